"""Publish one state in several ways: pushed to followers that connect, kept in a store, or both."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.files.watch import LOOK
from thinwire.links.tcp.congestion import AUTO
from thinwire.state.history import History
from thinwire.state.layout import Bounds, Dtypes, Layout
from thinwire.state.patches.patch import Meta, Version
from thinwire.types import InputError, LinkError, require
from thinwire.uses.following.follower_base import SLOW
from thinwire.uses.following.pull.store_fetching import resume
from thinwire.uses.following.pull.store_writer import ShelfWriter
from thinwire.uses.following.push.publisher import Publisher

PATIENCE = 300.0  # seconds that finish waits for a follower
ATTEMPTS = 2  # that finish has at a store which takes no file: to sweep it may have helped
SAVE_EVERY = 60.0  # seconds between two saves of a state at least, but for the last


class PublishTargets:
    """Publish one state to followers that connect (``listen``), to a store (``keep``), or to both.

    It begins with ``tensors``, which ``publish`` makes the first version and lets go of; ``dtype`` and
    ``bounds`` are those of ``Layout.of``. ``push`` and ``pull`` are the publishers of the two.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        dtype: Dtypes = None,
        bounds: Bounds = None,
        name: str = "state",
        token: bytes | None = None,
        strict: bool = False,
    ) -> None:
        self._tensors, self._kind, self._strict = tensors, (dtype, bounds), strict
        self.name, self._token = name, token
        self.push: Publisher | None = None
        self.pull: ShelfWriter | None = None
        self._own: History | None = None
        self.newest = Version()
        self._state: Path | None = None
        self._saved, self._save_at = 0, -SAVE_EVERY  # number of the version, and when the next may be
        self._unsaved = ""  # why the last attempt failed

    @property
    def history(self) -> History:
        """The versions."""
        if self.push is not None:
            return self.push.history
        if self._own is None:
            self._own = History(Layout.of(self._tensors, *self._kind))
            self._own.overflows.strict = self._strict
        return self._own

    def listen(self, host: str, port: int, state: Path | None = None, congestion: str = AUTO) -> None:
        """Let followers connect; go on from the file ``state`` if it is there."""
        at = host, port, self._token, self.name
        known: Any = {"state": state, "congestion": congestion, "strict": self._strict}
        self.push = Publisher(self._tensors, *at, *self._kind, **known)
        self._state = state

    def save(self) -> str:
        """Write a version that is not in the file yet, unless that was done lately; return what went wrong.

        The versions go on then, and the file is tried again. It is empty where the last attempt did well.
        """
        now, newest = time.monotonic(), self.newest.number
        if self.push is None or self._state is None or self._saved == newest or now < self._save_at:
            return self._unsaved
        self._save_at = now + SAVE_EVERY
        try:
            self.push.save()
        except InputError as e:
            self._unsaved = str(e)
        else:
            self._saved, self._unsaved = newest, ""
        return self._unsaved

    def keep(self, url: str) -> None:
        """Write versions to a store, on from what it holds, so that readers need a patch only."""
        resume(self.history, url, self._token, self.name)
        self.pull = ShelfWriter(url, self.history, name=self.name, token=self._token)

    def publish(self, tensors: Mapping[str, Tensor] | None = None, meta: Meta | None = None) -> None:
        """Make the tensors that it began with, or these, the newest version, and note ``meta`` with it."""
        self._tensors.update(tensors or {})
        self._publish(meta or {})
        self.check()

    def replace(self, tensors: dict[str, Tensor], path: Path | str, meta: Meta | None = None) -> None:
        """Make ``tensors`` the newest version, and note ``meta`` with it.

        Errors: ``InputError``, naming their ``path``, where they do not fit: then all is as before.
        """
        if self.push is not None:
            self.push.check()  # what ended the feed is not the tensors' fault
        self._tensors.update(tensors)
        try:
            self._publish(meta)
        except InputError as e:
            reason = str(e).partition("; ")[0]
            raise InputError(
                f"{path} does not fit what is published: {reason}; restore it, or start a new publisher"
            ) from e

    def _publish(self, meta: Meta | None = None) -> None:
        push = self.push
        try:
            if push is not None:
                self.newest = push.publish(None, None, **(meta or {}))
            else:
                self.newest = self.history.publish(self._tensors, meta)
        finally:
            self._tensors.clear()  # the bits of a version are in the history

    def check(self) -> None:
        """Raise what has ended the feed or the store's writer, if anything did; wake that if it is behind."""
        if self.push is not None:
            self.push.check()
        pull = self.pull
        if pull is not None and (pull.status.error or pull.status.version < self.newest.number):
            pull.offer()

    def arrived(self) -> bool:
        """Return whether the store and all followers, of whom there must be one, have the newest version."""
        newest = self.newest.number
        stored = self.pull is None or self.pull.status.version >= newest
        if self.push is None or not stored:
            return stored
        followers = self.push.followers
        return bool(followers) and all(f.greeted and f.version >= newest for f in followers)

    def finish(self) -> None:
        """Wait until the store, or a follower and all others that are there, have the newest version."""
        if self.pull is not None:
            self._fill(self.pull)
        if self.push is None:
            return
        ends, push = time.monotonic() + PATIENCE, self.push
        while not any(f.greeted and f.version >= push.newest.number for f in push.followers):
            push.check()
            if time.monotonic() > ends:
                raise LinkError(self._waited_in_vain(push))
            time.sleep(LOOK)
        push.flush(max(0.0, ends - time.monotonic()))

    def _fill(self, pull: ShelfWriter) -> None:
        """Wait until the store has the newest version; where it takes no file, for another attempt only."""
        patience = PATIENCE + self.history.layout.nbytes / SLOW
        ends = time.monotonic() + patience
        while pull.status.version < self.newest.number:
            self.check()
            if pull.status.failures >= ATTEMPTS:
                pull.close(0.0)  # raises what it was
            whole = time.monotonic() < ends
            require(whole, LinkError, f"{pull.where} did not take the newest version in {patience:.0f} s")
            time.sleep(LOOK)

    def _waited_in_vain(self, push: Publisher) -> str:
        behind = [f"{f.name} holds version {f.version}" for f in push.followers]
        why = "; ".join(behind[:3]) if behind else "nobody follows; start 'thinwire follow' with this address"
        return f"no follower took version {push.newest.number} within {PATIENCE:g} s: {why}"

    def close(self) -> None:
        """Write what is new to the store, and stop."""
        try:
            if self.pull is not None:
                self.pull.close()
        finally:
            if self.push is not None:
                self.push.close()
