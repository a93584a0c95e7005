"""Patches for a feed's followers, made on threads of their own: the followers' other business goes on.

A keyframe takes as long as the state is large, so there is a thread for these alone: nobody's patches wait
for whoever joins late.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

from thinwire.engines.sync.serving import Order, Parcel
from thinwire.state.history import History

YOUNG = 10.0  # seconds that a keyframe is given to whoever joins: then a fresh one spares them older contents
FORGET = 0.5  # weight of the newest measurement in the mean time that a patch takes


class Making:
    """Make parcels, one keyframe and one patch at a time; each calls ``ready``, on a thread here."""

    def __init__(self, history: History, ready: Callable[[], None]) -> None:
        self._history, self._ready = history, ready
        self._patches = ThreadPoolExecutor(1, thread_name_prefix="patches")
        self._keyframes = ThreadPoolExecutor(1, thread_name_prefix="keyframes")
        self._kept: weakref.WeakValueDictionary[tuple[int, int], Parcel] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._jobs: dict[int, Future[Parcel]] = {}  # by base: followers at one version share the work
        self._keyframe: weakref.ref[Parcel] | None = None  # made last, while somebody uses it
        self._keyframe_at = 0.0
        self.seconds = 0.0  # that a patch from a version takes, about

    def start(self, order: Order) -> Future[Parcel]:
        """Return a future for the parcel of an order, shared with others that are waiting for the same."""
        self._jobs = {base: job for base, job in self._jobs.items() if not job.done()}
        base = order.base if self._history.knows(order.base) else 0
        found = self._jobs.get(base) or (None if base else self._lately(order.above))
        if found is None:
            pool = self._patches if base else self._keyframes
            found = self._jobs[base] = pool.submit(self._make, base, not order.compare)
        found.add_done_callback(lambda _: self._ready())  # at once where it is there already
        return found

    def _lately(self, above: int) -> Future[Parcel] | None:
        """Return the keyframe made last, if it is of a version over ``above`` and still young.

        A patch must lead on from there: then one more follower takes no time and no memory.
        """
        parcel, made_at = self._keyframe() if self._keyframe is not None else None, self._keyframe_at
        if parcel is None or parcel.version <= above or monotonic() - made_at > YOUNG:
            return None
        if self._history.find(parcel.version, parcel.hash) != parcel.version:
            return None
        found: Future[Parcel] = Future()
        found.set_result(parcel)
        return found

    def kept(self, base: int, version: int, content: int) -> Parcel | None:
        """Return a parcel that somebody still uses."""
        with self._lock:
            found = self._kept.get((base, version))
        return found if found is not None and found.hash == content else None

    def parcels(self) -> list[Parcel]:
        """Return all parcels that somebody still uses; from any thread."""
        with self._lock:
            return list(self._kept.values())

    def close(self) -> None:
        """End the threads once they are done with what they make."""
        for pool in (self._patches, self._keyframes):
            pool.shutdown(cancel_futures=True)

    def _make(self, base: int, mark: bool) -> Parcel:
        began = monotonic()
        patch = self._history.patch(base or None, mark)
        found = self.kept(patch.base, patch.version, patch.hash)
        if found is None:
            numbers = (patch.base, patch.base_hash, patch.version, patch.hash)
            found = Parcel(*numbers, patch.body, patch.head())
            with self._lock:
                self._kept[patch.base, patch.version] = found
        if not patch.base:
            self._keyframe, self._keyframe_at = weakref.ref(found), monotonic()
        else:
            self.seconds += FORGET * (monotonic() - began - self.seconds)
        return found
