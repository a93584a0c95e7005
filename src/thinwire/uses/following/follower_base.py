"""What following a state is like, and using it, however it comes: by link or through a store."""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from thinwire.dtypes import check_torch
from thinwire.links.inbox import renewed
from thinwire.types import Closing, InputError, LinkError

if TYPE_CHECKING:  # the defaults below are named where nothing is followed yet
    from torch import Tensor, nn

    from thinwire.state.layout import Array, Layout
    from thinwire.state.loaded.loader_recording import Load
    from thinwire.state.patches.patch import Version
    from thinwire.state.replica import Replica
    from thinwire.state.values import Bits
    from thinwire.uses.following.mirror import Mirror

TIMEOUT = 60.0  # seconds that a wait takes at most, unless told otherwise
PATIENCE = 300.0  # seconds without a sign of the publisher after which iteration gives up
POLL = 2.0  # seconds between two looks into a store
SLOW = 5e4  # bytes/s below which a store's file does not count as coming


class Applied(NamedTuple):
    """What ``apply_to`` did: seconds the consumer waited, the version in use, and whether weights changed.

    If they did, results of the old ones, such as a cache of keys and values, are stale.
    """

    pause: float
    version: Version
    new: bool


class Copy(Protocol):
    """What a follower holds of a state: a ``Replica``, or what is like one. ``shown``: the version in use."""

    @property
    def layout(self) -> Layout: ...

    @property
    def shown(self) -> Version: ...

    def catch_up(self, timeout: float = ...) -> None: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def arrays(self) -> dict[str, Array]: ...

    def bits(self) -> dict[str, Bits]: ...


class AnyFollower(Closing):
    """What any follower does: waits, and models, tensors and a file of the copy that it holds.

    ``every``: seconds after which a wait for versions looks whether the publisher has gone.
    """

    def __init__(self, patience: float, every: float = math.inf) -> None:
        self._patience, self._every = patience, every
        self._changed = threading.Condition()  # there is another version, or an end
        self._fatal: Exception | None = None  # what ended it
        self._closing = False

    @property
    @abstractmethod
    def held(self) -> Version:
        """The newest version that is here, in use or not; number 0 before the first."""

    @abstractmethod
    def _copy(self) -> Copy:
        """Return the copy itself. Errors: ``InputError`` before anything came."""

    @abstractmethod
    def _show(self, model: nn.Module, kept: Collection[str]) -> bool:
        """Bring a model to the newest version; return whether that is new. Errors: as ``apply_to``."""

    @abstractmethod
    def _fill(self, model: nn.Module, load: Load, kept: Collection[str]) -> bool:
        """Bring a model that ``load`` fills to it; return whether that is new. Errors: as ``load_into``."""

    @property
    @abstractmethod
    def silence(self) -> float:
        """Seconds since a sign of the publisher."""

    @abstractmethod
    def _end(self) -> None:
        """Stop the threads."""

    @abstractmethod
    def _missed(self, version: int, timeout: float) -> str:
        """Return that a version did not come, and why that may be."""

    @abstractmethod
    def _lost(self) -> str:
        """Return that the publisher gives no sign, and why that may be."""

    def _at_end(self) -> bool:
        """Return whether no more versions will come."""
        return self._closing

    @property
    def current(self) -> bool:
        """Whether what is held is of the publisher that is there now, and not of one before it.

        A publisher that starts again may give numbers that an earlier one gave, until this end has told it
        what it holds. In a store numbers go on.
        """
        return True

    def wait(self, version: int = 1, timeout: float = TIMEOUT, *, current: bool = False) -> Version:
        """Return the newest version here once its number is at least ``version``.

        ``current``: wait also until that is of the publisher that is there now, which gave that number.
        Errors: ``LinkError``, naming publisher or store, after ``timeout`` seconds; and those of the class.
        """

        def here() -> bool:
            return self.held.number >= version and (self.current or not current)

        self._await(here, timeout)
        if not here():
            raise LinkError(self._missed(version, timeout))
        return self.held

    def __iter__(self) -> Iterator[Version]:
        """Yield each newest version when it arrives, until ``close`` or the goodbye of a store's publisher.

        Of the versions that arrive while the caller is busy, only the last is yielded. Errors: ``LinkError``
        after ``patience`` seconds without a sign of the publisher.
        """
        seen = 0
        while True:
            left = min(self._every, max(0.0, self._patience - self.silence))
            self._await(lambda: self.held.number > seen or self._at_end(), left)  # noqa: B023
            if self._closing:
                return
            if self.held.number > seen:
                version = self.held
                seen = version.number
                yield version
            elif self._at_end():
                return
            elif self.silence >= self._patience:
                raise LinkError(self._lost())

    def close(self) -> None:
        """Stop following. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._end()

    def _await(self, done: Callable[[], bool], timeout: float) -> None:
        patience = min(timeout, threading.TIMEOUT_MAX)
        with self._changed:
            self._changed.wait_for(lambda: done() or self._closing or self._fatal is not None, patience)
        self._raise()

    def _raise(self) -> None:
        """Raise what ended the following, if anything did."""
        if self._fatal is not None:
            raise renewed(self._fatal)

    def apply_to(self, model: nn.Module, kept: Collection[str] = ()) -> Applied:
        """Update ``model`` to the newest version here, between two of its steps; return what that did.

        Parameters become views of the copy, so nobody else may write to them; buffers are copied. Models
        that were given before are updated too, so all are at the same version. ``kept``: parameters, by name
        or shell pattern, that may stay as they are; the base under an adapter of peft's always may. Errors:
        those of the class, and ``InputError`` naming the first tensor that does not fit, or a parameter that
        nothing in the state fills.
        """
        self._raise()
        began = time.perf_counter()
        new = self._show(model, kept)
        return Applied(time.perf_counter() - began, self._copy().shown, new)

    def load_into(self, model: nn.Module, load: Load, kept: Collection[str] = ()) -> Applied:
        """Update ``model``, which its host fills by ``load``, to the newest version here.

        For engines that fuse, shard or rename what a checkpoint has: ``load`` takes pairs of name and tensor,
        as ``load_weights`` of vLLM's models does. It is called once, with tensors without values, and shows
        where each element goes; from then on what changed is written there, in place. ``kept``: parameters,
        by name or shell pattern, that may stay as they are. Errors: those of the class, and ``InputError``
        naming a tensor that the loader does not copy, or a parameter that nothing in the state fills.

        Return what it did.
        """
        self._raise()
        began = time.perf_counter()
        new = self._fill(model, load, kept)
        return Applied(time.perf_counter() - began, self._copy().shown, new)

    def tensors(self) -> dict[str, Tensor]:
        """Return the newest version's tensors by name, not copied, and update all models to that version.

        They are valid until the next call of this or of ``apply_to``: then their memory is written again.
        Unlike ``apply_to``, this waits while the version is being written; ``LinkError`` after ``TIMEOUT``
        seconds.
        """
        check_torch("tensors(), in place of arrays(), needs")
        return self._caught_up().tensors()

    def arrays(self) -> dict[str, Array]:
        """Return the same as arrays, for which torch need not be there; ``dtypes`` says what they hold.

        Where numpy has no such dtype, they are of the package ml_dtypes if that is there; else they hold the
        bits, as unsigned integers.
        """
        return self._caught_up().arrays()

    @property
    def dtypes(self) -> dict[str, str]:
        """The name of each tensor's dtype, as torch calls it. Errors: ``InputError`` before anything came."""
        layout = self._copy().layout
        return {name: layout.slots[i].kind for name, i in layout.index.items()}

    def write(self, path: str | Path) -> Version:
        """Write the newest version as a safetensors file that replaces ``path`` at once, and return which.

        As ``tensors``, this updates all models; tied tensors are written once. Errors: ``OSError``, and
        ``InputError`` for a dtype that such files do not hold.
        """
        copy = self._caught_up()
        write_version(Path(path), copy, copy.shown.number)
        return copy.shown

    def _caught_up(self) -> Copy:
        """Return the copy, with the newest version in use."""
        self._raise()
        copy = self._copy()
        copy.catch_up(TIMEOUT)
        return copy


class FollowerBase(AnyFollower):
    """The base of ``Follower`` and ``ShelfReader``: what they hold is one replica."""

    def __init__(self, mirror: Mirror, state: Path | None, patience: float, every: float = math.inf) -> None:
        super().__init__(patience, every)
        self._mirror, self._state = mirror, state

    @property
    @abstractmethod
    def replica(self) -> Replica:
        """The copy itself. Errors: ``InputError`` before anything came."""

    def close(self) -> None:
        """Stop following; with ``state``, save the copy. Safe to call twice."""
        ended = self._closing
        super().close()
        if self._state is not None and not ended and self._mirror.held.hash:
            self.save()

    def save(self, path: str | Path | None = None) -> None:
        """Write the copy to a safetensors file, to go on from. Errors: ``InputError`` without a path."""
        target = self._state if path is None else Path(path)
        if target is None:
            raise InputError("there is no place to save to; give a path, or state= from the start")
        self.replica.save(target)

    def _copy(self) -> Replica:
        return self.replica

    def _show(self, model: nn.Module, kept: Collection[str]) -> bool:
        return self._mirror.show(self.replica, model, kept)

    def _fill(self, model: nn.Module, load: Load, kept: Collection[str]) -> bool:
        return self._mirror.fill(self.replica, model, load, kept)


def write_version(path: Path, copy: Copy, number: int) -> None:
    """Write the version in use as a safetensors file, which calls it by ``number``. Errors: as ``write``."""
    from thinwire.files.checkpoint import HASH, VERSION, write_bits

    version = copy.shown
    notes = {HASH: f"{version.hash:016x}"} | {key: str(value) for key, value in version.meta.items()}
    write_bits(path, copy.bits(), notes | {VERSION: str(number)})
