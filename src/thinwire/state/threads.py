"""Work on many pieces at once: compiled passes, numpy and coders let other threads run meanwhile.

Threads live for one call, or for one patch that comes: nothing is left of them, and whoever waits for pieces
never waits for itself. What torch does in such a thread should be small (``QUIET``): above that, each would
start torch's own threads.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

MOST = 8  # with more, each waits for the interpreter: 16 took a fifth longer for the same patch
WORTH = 1 << 20  # elements that are worth a thread of their own: half a millisecond or more
QUIET = 3 << 13  # elements of a tensor that torch works on in the thread that asks
_SHARES = 2  # runs of pieces a thread: not all take as long


Array = npt.NDArray[Any]
Done = TypeVar("Done")
Given = TypeVar("Given")


class _Rooms(threading.local):
    """Memory that a thread uses again and again: fresh pages cost more than to fill them."""

    def __init__(self) -> None:
        self.known = dict[str, Array]()


_rooms = _Rooms()


def room(name: str, n: int, dtype: np.dtype) -> Array:
    """Return memory [n] of this thread's, as it was left; it is for others once the name is asked for again.

    >>> room("words", 3, np.dtype(np.int16)).shape
    (3,)
    """
    nbytes = n * dtype.itemsize
    known = _rooms.known.get(name)
    if known is None or known.size < nbytes:
        known = _rooms.known[name] = np.empty(nbytes, dtype=np.uint8)
    found: Array = known[:nbytes].view(dtype)
    return found


def cores() -> int:
    """Return how many threads there may be: one a core that this process may use, at most ``MOST``."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST, mine)


class Line(Generic[Given, Done]):
    """Do ``work`` on items as they are added, several at once; at most ``most`` of them will be.

    Where there is one core or one item, ``add`` does it, and what went wrong shows in ``results`` too.

    >>> line = Line(abs, 2)
    >>> line.add(-2), line.add(3), list(line.results()), line.close()
    (None, None, [2, 3], None)
    """

    def __init__(self, work: Callable[[Given], Done], most: int) -> None:
        self._work, self._begun = work, list[Future[Done]]()
        count = min(cores(), most)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="words") if count > 1 else None

    def add(self, item: Given) -> None:
        """Begin with an item."""
        if self._pool is not None:
            self._begun.append(self._pool.submit(self._work, item))
            return
        done: Future[Done] = Future()
        self._begun.append(done)
        try:
            done.set_result(self._work(item))
        except Exception as e:
            done.set_exception(e)

    def results(self) -> Iterator[Done]:
        """Yield, in order, what became of the items since the last time. Errors: those of ``work``."""
        begun, self._begun = self._begun, []
        for done in begun:
            yield done.result()

    def close(self) -> None:
        """End the threads once all that was begun is done; what was not begun is left. Harmless twice."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def in_order(work: Callable[[Given], Done], items: Sequence[Given]) -> Iterator[Done]:
    """Yield what ``work`` returns for each item, in their order; several at once.

    Errors: those of ``work``, once all that was begun is done; what was not begun is left.

    >>> list(in_order(abs, [-2, 3]))
    [2, 3]
    """
    if min(cores(), len(items)) < 2:
        yield from map(work, items)
        return
    line = Line(work, len(items))
    try:
        for item in items:
            line.add(item)
        yield from line.results()
    finally:
        line.close()


def by_runs(work: Callable[[slice], Done], sizes: Sequence[int]) -> list[Done]:
    """Return what ``work`` returns for runs of pieces of these ``sizes``; small ones share a thread."""
    return list(in_order(work, cut(sizes, WORTH, _SHARES * cores()))) if sizes else []


def cut(sizes: Sequence[int], fewest: int, most: int) -> list[slice]:
    """Return runs of about the same sum of ``sizes``: at most ``most``, of at least about ``fewest``.

    >>> cut([5, 1, 1, 5], 6, 8)
    [slice(0, 2, None), slice(2, 4, None)]
    """
    done = list(accumulate(sizes, initial=0))
    count = max(1, min(most, done[-1] // fewest))
    ends = sorted({bisect_left(done, done[-1] * i / count, 1) for i in range(1, count)} | {len(sizes)})
    return [slice(*ends) for ends in pairwise([0, *ends])]
