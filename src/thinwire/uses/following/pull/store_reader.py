"""Follow a state through a folder, a web server or an object store, where nobody can connect to anybody."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.files.local_folder import open_folder
from thinwire.state.layout import MAX_NBYTES, TooLarge
from thinwire.state.patch_code.patch_stream import check_coder
from thinwire.state.patches.patch import Version
from thinwire.state.replica import CHECK_EVERY, Replica
from thinwire.types import AuthError, InputError, LinkError, ThinwireError, require
from thinwire.uses.following.follower_base import PATIENCE, POLL, SLOW, TIMEOUT, FollowerBase
from thinwire.uses.following.mirror import Base, Mirror
from thinwire.uses.following.pull.manifest import Proof
from thinwire.uses.following.pull.store_fetching import Fetching

if TYPE_CHECKING:  # a copy of arrays needs no torch
    from torch import nn

SIGNS = 8  # of the publisher, the last ones, by which its clock is judged: either clock may be set
MOMENT = 1.0  # seconds for a look to end that nobody waits for any more
SLOWEST = 30.0  # seconds between two looks, where the store cannot be reached
ANSWERS = 10.0  # seconds after which a store that does not answer is said not to


@dataclass(frozen=True)
class ReaderStatus:
    """Where a reader stands.

    ``version`` is the number of the version in use, ``held`` of the newest one here, ``age`` the seconds
    since that was published (None: none yet), ``nbytes`` all bytes read, ``ratio`` what the versions would
    have taken in full over that, ``trip`` the shortest time for the manifest [s], ``rate`` of patches
    [bytes/s], ``error`` what went wrong last.
    """

    version: int
    held: int
    age: float | None
    nbytes: int
    ratio: float
    trip: float | None
    rate: float | None
    error: str | None


class ShelfReader(FollowerBase):
    """Keep a copy of the state in the store at ``url``; a thread of its own looks every ``poll`` seconds.

    - ``token``: the publisher's.
    - ``into``: the model to update; ``apply_to`` does that. The state must fit it.
    - ``base``: tensors that are already here, by name (default: the weights of ``into``). If the publisher
      knows these contents, only the changes since then are read.
    - ``state``: a file to go on from, in place of any base. ``save`` and ``close`` write it.
    - ``name``: the expected name of the state; another one is an error.
    - ``patience``: seconds without a sign of the publisher after which iteration fails.
    - ``max_nbytes``: the largest state that is accepted.
    - ``check_every``: patches between two hashes of all contents (0: never).
    - ``options``: for fsspec.

    Errors are raised by ``wait``, iteration and ``apply_to``: ``AuthError`` if only one end has a token, or
    another one; ``InputError`` if the state is not the expected one; ``TooLarge`` if it is larger than
    ``max_nbytes``.

    >>> reader = ShelfReader("models/policy", poll=60.0)
    >>> reader.status.version, reader.close()
    (0, None)
    """

    def __init__(
        self,
        url: str | Path,
        token: bytes | None = None,
        into: nn.Module | None = None,
        *,
        base: Base | None = None,
        name: str | None = None,
        state: str | Path | None = None,
        poll: float = POLL,
        patience: float = PATIENCE,
        max_nbytes: int = MAX_NBYTES,
        check_every: int = CHECK_EVERY,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_coder()
        require(poll > 0, InputError, f"poll={poll} s is not above 0")
        folder = open_folder(url, **(options or {}))
        path = None if state is None else Path(state)
        super().__init__(Mirror(into, path, max_nbytes, base, check_every), path, patience, poll)
        self.where, self._poll = folder.where, poll
        self._fetching = Fetching(folder, Proof(token), self._mirror, name=name)
        self._left = False  # the publisher said goodbye, and its last version is here
        self._landed = 0  # versions that came
        self._error: ThinwireError | None = None  # of the last look
        self._asked = math.inf  # when the look began that is under way
        self._sign, self._signed_at = (0.0, ""), time.monotonic()  # the publisher's last; when it was seen
        # By how much its clock is ahead of this steady one, in s: at least, as signs come late.
        self._leads: tuple[float, ...] = ()
        self._thread = threading.Thread(target=self._run, name=f"thinwire reader {self.where}", daemon=True)
        self._thread.start()

    @property
    def held(self) -> Version:
        return self._fetching.held

    @property
    def confirmed(self) -> bool:
        """Whether the copy was the store's newest version at some look since this began to follow.

        Before that, the copy comes from the base or the file: it may be old.
        """
        return self._fetching.confirmed

    @property
    def replica(self) -> Replica:
        """The copy itself. Errors: ``InputError`` before the first look at the store succeeded."""
        if self._fetching.replica is None:
            raise InputError(f"nothing has come from {self.where} yet; wait() for it")
        return self._fetching.replica

    @property
    def status(self) -> ReaderStatus:
        fetching, error = self._fetching, self._fatal or self._trouble()
        replica = fetching.replica
        whole = replica.layout.nbytes * self._landed if replica is not None else 0
        published = self.held.published
        return ReaderStatus(
            version=replica.version if replica is not None else 0,
            held=self.held.number,
            age=max(0.0, self._publishers_time() - published) if published else None,
            nbytes=fetching.nbytes,
            ratio=whole / fetching.nbytes if fetching.nbytes else 0.0,
            trip=fetching.trip,
            rate=fetching.patch_nbytes / fetching.seconds if fetching.seconds else None,
            error=str(error) if error is not None else None,
        )

    def _missed(self, version: int, timeout: float) -> str:
        return f"version {version} did not come from {self.where} in {timeout:g} s{self._reason()}"

    def _lost(self) -> str:
        return f"no sign of the publisher at {self.where} for {self._patience:g} s{self._reason()}"

    @property
    def silence(self) -> float:
        """Seconds since a sign of the publisher or a file of its store, less what a file may take."""
        return self._since(self._signed_at)

    def _end(self) -> None:
        # who is silent for longer than anybody waits may stay so until a timeout of its store's
        silent = self.silence > self._patience
        self._thread.join(MOMENT if silent else min(TIMEOUT, self._patience))

    def _since(self, sign: float) -> float:
        last = max(sign, self._fetching.read_at)
        return time.monotonic() - last - self._fetching.reading / SLOW

    def _trouble(self) -> ThinwireError | None:
        """Return what went wrong at the last look, or that the one under way gets no answer."""
        silent = self._since(self._asked)
        if silent < min(ANSWERS, self._patience / 2):
            return self._error
        told = f"{self.where} has not answered for {silent:.3g} s; check the network"
        return LinkError(f"{told}, and the endpoint if one is set")

    def _reason(self) -> str:
        error = self._trouble()
        return f": {error}" if error else ""

    def _at_end(self) -> bool:
        return self._left or self._closing

    def _run(self) -> None:
        pause = 0.0
        while True:
            try:
                if self._rested(pause):
                    return
                self._look()
                pause = self._poll
            except (InputError, AuthError, TooLarge) as e:  # time does not mend these
                self._fatal = e
            except (ThinwireError, OSError) as e:
                self._error = e if isinstance(e, ThinwireError) else _unread(e)
                pause = min(max(self._poll, 2 * pause), max(SLOWEST, self._poll))
            except Exception as e:  # told to whoever waits
                self._fatal = e
            self._told()

    def _rested(self, pause: float) -> bool:
        """Wait between two looks; return whether to end."""
        pause = min(pause, threading.TIMEOUT_MAX)
        with self._changed:
            return self._changed.wait_for(lambda: self._closing or self._fatal is not None, pause)

    def _look(self) -> None:
        self._asked = time.monotonic()
        try:
            self._mirror.prepare()  # a swap may have come since the last look
            self._fetching.look(self._land)
            self._error = None
            self._left = self._fetching.manifest is not None and self._fetching.manifest.lease <= 0
        finally:
            self._asked = math.inf
            manifest = self._fetching.manifest
            if manifest is not None and (manifest.written, manifest.instance) != self._sign:
                self._sign, self._signed_at = (manifest.written, manifest.instance), time.monotonic()
                self._leads = (*self._leads, manifest.written - self._signed_at)[-SIGNS:]

    def _publishers_time(self) -> float:
        """Return the time by this machine's clock, or by the publisher's where that is ahead."""
        now = time.monotonic()
        return max([time.time(), *(now + lead for lead in self._leads)])

    def _land(self, version: Version) -> None:
        self._landed += 1
        self._told()

    def _told(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _unread(error: OSError) -> LinkError:
    """Return why a store cannot be read; which one is known to whoever is told."""
    if isinstance(error, FileNotFoundError):
        return LinkError(
            "no state is published there yet; check the path, or start a publisher that writes there"
        )
    return LinkError(f"it cannot be read: {error.strerror or error}")
