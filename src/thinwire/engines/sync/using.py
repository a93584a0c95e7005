"""What using a followed state is like, however it comes: by link or through a store."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from thinwire.types import InputError

if TYPE_CHECKING:  # the defaults below are named where nothing is followed yet
    from torch import Tensor, nn

    from thinwire.engines.sync.mirror import Mirror
    from thinwire.state.patches.patch import Version
    from thinwire.state.replica import Replica

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


class Using(ABC):
    """The base of ``Follower`` and ``ShelfReader``: models, tensors and a file of what they hold."""

    _mirror: Mirror
    _state: Path | None

    @property
    @abstractmethod
    def replica(self) -> Replica:
        """The copy itself. Errors: ``InputError`` before anything came."""

    @abstractmethod
    def close(self) -> None:
        """Stop following."""

    @abstractmethod
    def _raise(self) -> None:
        """Raise what ended the following, if anything did."""

    def apply_to(self, model: nn.Module) -> Applied:
        """Update ``model`` to the newest version here, between two of its steps; return what that did.

        Parameters become views of the copy, so nobody else may write to them; buffers are copied. Models
        that were given before are updated too, so all are at the same version. Errors: those of the class,
        and ``InputError`` naming the first tensor that does not fit.
        """
        self._raise()
        began = time.perf_counter()
        new = self._mirror.show(self.replica, model)
        return Applied(time.perf_counter() - began, self.replica.shown, new)

    def tensors(self) -> dict[str, Tensor]:
        """Return the newest version's tensors by name, not copied, and update all models to that version.

        They are valid until the next call of this or of ``apply_to``: then their memory is written again.
        Unlike ``apply_to``, this waits while the version is being written; ``LinkError`` after ``TIMEOUT``
        seconds.
        """
        self._raise()
        replica = self.replica
        replica.catch_up(TIMEOUT)
        return replica.tensors()

    def save(self, path: str | Path | None = None) -> None:
        """Write the copy to a safetensors file, to go on from. Errors: ``InputError`` without a path."""
        target = self._state if path is None else Path(path)
        if target is None:
            raise InputError("there is no place to save to; give a path, or state= from the start")
        self.replica.save(target)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
