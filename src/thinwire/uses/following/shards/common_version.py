"""When parts of a state move on: together, so that what is held of all of them is one version.

A part's patch waits until all other parts have theirs to the same version; then all are applied. Where one
skipped a version, as patches merge what a line cannot carry, those behind go on until they meet again. A part
that is gone stops the others, who keep the version that they all have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from thinwire.types import DesyncError, InputError, require
from thinwire.uses.following.shards.shard_mark import Mark


class CommonVersion:
    """What each part holds, and is about to hold. ``met`` is called whenever all hold the same version.

    ``lock`` is held meanwhile; who has it sees no part move.
    """

    def __init__(self, peers: Sequence[str], met: Callable[[], None]) -> None:
        self.lock = threading.Condition(threading.RLock())
        self._peers, self._met = peers, met
        self._parts: list[int | None] = [None] * len(peers)
        self._held: list[Mark | None] = [None] * len(peers)
        self._coming: list[Mark | None] = [None] * len(peers)
        self._moving: set[int] = set()
        self._closed = False

    @property
    def whole(self) -> bool:
        """Whether all parts hold the same version, and none is on its way to another one."""
        first = self._held[0]
        same = first is not None and all(m is not None and m.version == first.version for m in self._held)
        return same and not self._moving

    @property
    def moving(self) -> bool:
        """Whether a part is on its way to another version."""
        return bool(self._moving)

    @contextmanager
    def step(self, index: int, mark: Mark) -> Iterator[None]:
        """Wait until a part may go to a version; it holds that after the ``with`` block, unless by an error.

        Errors: ``InputError`` where the mark is that of another part, or there are other parts than here;
        ``DesyncError`` after ``close``.
        """
        with self.lock:
            self._check(index, mark)
            self._coming[index] = mark
            self.lock.notify_all()
            self.lock.wait_for(lambda: self._closed or not self._early(index))
            if self._closed:
                raise DesyncError("the other parts are not followed any more")
            self._moving.add(index)
        done = False
        try:
            yield
            done = True
        finally:
            with self.lock:
                self._moving.discard(index)
                self._coming[index] = None
                self._hold(index, mark if done else self._held[index])

    def confirm(self, index: int, mark: Mark) -> None:
        """Note that what a part holds is this version."""
        with self.lock:
            self._check(index, mark)
            self._hold(index, mark)

    def behind(self) -> list[int]:
        """Return the parts that others wait for; where none waits, those that hold nothing."""
        with self.lock:
            awaited = {mark.version for mark in self._coming if mark is not None}
            idle = [(i, held) for i, held in enumerate(self._held) if self._coming[i] is None]
            late = [i for i, held in idle if held is not None and awaited and held.version not in awaited]
            return [i for i, held in idle if held is None] or late

    def close(self) -> None:
        """Let no part move any more, and none wait."""
        with self.lock:
            self._closed = True
            self.lock.notify_all()

    def _hold(self, index: int, mark: Mark | None) -> None:
        self._held[index] = mark
        if self.whole:
            self._met()
        self.lock.notify_all()

    def _early(self, index: int) -> bool:
        """Return whether some other part may still get to the version that this one is about to have."""
        mine, held = self._coming[index], self._held[index]
        return mine is not None and any(
            self._waits(mine, held, other) for other in range(len(self._peers)) if other != index
        )

    def _waits(self, mine: Mark, held: Mark | None, other: int) -> bool:
        latest = self._coming[other] or self._held[other]
        if latest is None:
            return True
        if latest.run == mine.run:
            return latest.number < mine.number
        # another run of the trainer: it comes there, unless this part is the one that is left behind
        return self._coming[other] is None and held is not None and latest.run == held.run

    def _check(self, index: int, mark: Mark) -> None:
        peer, here = self._peers[index], len(self._peers)
        told = f"{peer} is one of {mark.parts} parts, and {here} are followed; give the addresses of all"
        require(mark.parts == here, InputError, told)
        other = next((p for p, n in zip(self._peers, self._parts, strict=True) if n == mark.part), peer)
        told = f"part {mark.part} is at {peer} and at {other}; give each part's address once"
        require(other == peer, InputError, told)
        self._parts[index] = mark.part
        for where, known in zip(self._peers, zip(self._coming, self._held, strict=True), strict=True):
            odd = next((m for m in known if m and m.version == mark.version and m.step != mark.step), None)
            told = f"version {mark.number} is step {mark.step} at {peer} and {odd and odd.step} at {where}"
            require(odd is None, InputError, f"{told}; publish on all processes of the trainer after a step")
