"""A patch while it is made: one thread adds to its body, others read what is there and send it."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from thinwire.checksum import crc32
from thinwire.state.patches.patch import Patch

LARGE = 1 << 20  # bytes of a body from which on it is joined by numpy, which lets other threads run
LATELY = 5.0  # seconds within which who has a patch says what it uses


class _Body(NamedTuple):
    """Parts of a body, and where each of them ends."""

    parts: tuple[bytes | memoryview, ...] = ()
    ends: tuple[int, ...] = ()


class Draft:
    """What leads from version ``base`` (0: from nothing) to ``version``, as much of it as there is.

    The head, which has the body's checksum, comes last: the draft is ``whole`` then, and ``finish`` joins it.

    >>> draft = Draft(0, 0, 1, 7)
    >>> draft.add([b"ab", b"cde"])
    >>> bytes(draft.cut(1, 3)), draft.nbytes, draft.whole
    (b'bcd', 5, False)
    """

    def __init__(self, base: int, base_hash: int, version: int, hash: int) -> None:
        self.base, self.base_hash, self.version, self.hash = base, base_hash, version, hash
        self._body = _Body()  # replaced as one: readers see all of a change or nothing
        self.crc = 0  # of all that was added
        self.head = b""

    @classmethod
    def of(cls, patch: Patch) -> Draft:
        """Return the draft of a patch that is made."""
        draft = cls(patch.base, patch.base_hash, patch.version, patch.hash)
        draft.finish(patch)
        return draft

    @property
    def nbytes(self) -> int:
        """Bytes of the body that are there."""
        ends = self._body.ends
        return ends[-1] if ends else 0

    @property
    def whole(self) -> bool:
        """Whether no more will come."""
        return bool(self.head)

    @property
    def joined(self) -> bool:
        """Whether what is there is one piece of memory."""
        return len(self._body.parts) < 2

    @property
    def body(self) -> bytes | memoryview:
        """All of the body that is there, in one piece."""
        parts, nbytes = self._body.parts, self.nbytes
        if len(parts) == 1:
            return parts[0]
        if nbytes < LARGE:
            return b"".join(parts)
        found, at = np.empty(nbytes, np.uint8), 0
        for part in parts:
            found[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        return found.data.toreadonly()

    def add(self, parts: Sequence[bytes]) -> None:
        """Append to the body."""
        (had, ends), end = self._body, self.nbytes
        for part in parts:
            self.crc = crc32(part, self.crc)
        more = [end := end + len(part) for part in parts]
        self._body = _Body((*had, *parts), (*ends, *more))

    def finish(self, patch: Patch) -> None:
        """Say that this patch is what was made: its body takes the place of the parts."""
        head, body = self.head or patch.head(), patch.body if isinstance(patch.body, bytes) else patch.body[:]
        self._body, self.head = _Body((body,), (len(body),)), head

    def cut(self, start: int, nbytes: int) -> memoryview | bytes:
        """Return the bytes from ``start`` on, at most ``nbytes``, of what is there."""
        parts, ends = self._body
        found, at = list[memoryview](), start
        for i in range(bisect_right(ends, start), len(parts)):
            view = memoryview(parts[i])[at - ends[i] + len(parts[i]) :][: start + nbytes - at]
            found.append(view)
            at += len(view)
            if at == start + nbytes:
                break
        return found[0] if len(found) == 1 else b"".join(found)


More = Callable[[Draft], object]  # is told of a draft whenever there is more of it


def drafted(draft: Draft, sections: Iterable[list[bytes]], more: More) -> Draft:
    """Add sections to a draft as they are made, and return it."""
    for section in sections:
        draft.add(section)
        more(draft)
    return draft


class Ends(NamedTuple):
    """Where a patch starts and where it leads; 0: from nothing, or nowhere."""

    base: int = 0
    version: int = 0


class Lane:
    """A place where one patch at a time is made: ``lock`` is held meanwhile; ``under_way`` are its ends.

    ``wanted``: the patch will be sent.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.under_way = Ends()
        self.wanted = False  # else it is made just to see how large it is
        self._last, self._until = Ends(), 0.0

    def hand_over(self, base: int, version: int) -> None:
        """Say that a patch was made for somebody, who will soon say what it uses."""
        self._last, self._until = Ends(base, version), time.monotonic() + LATELY

    @property
    def lately(self) -> Ends:
        """The ends of the patch that was handed over within ``LATELY``."""
        return self._last if time.monotonic() < self._until else Ends()


def in_use(lanes: list[Lane], used: list[int]) -> list[int]:
    """Return the versions to keep, the most important first, given those that followers use, in that order.

    Where a patch leads comes before where it starts: that is of use again only if the patch does not arrive,
    while the next one starts from where this one leads, or else is a keyframe.
    """
    wanted = [ends for lane in lanes for ends in (lane.lately, lane.under_way if lane.wanted else Ends())]
    others = [number for lane in lanes if not lane.wanted for number in lane.under_way]
    numbers = [*(ends.version for ends in wanted), *used, *(ends.base for ends in wanted), *others]
    return [number for number in numbers if number]
