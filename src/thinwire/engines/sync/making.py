"""Patches for a feed's followers, made on a thread of their own: the followers' other business goes on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

from thinwire.engines.sync.serving import Order, Parcel
from thinwire.state.history import History

FORGET = 0.5  # weight of the newest measurement in the mean time that a patch takes


class Making:
    """Make parcels one at a time; ``ready`` is called, on the thread here, whenever one is done."""

    def __init__(self, history: History, ready: Callable[[], None]) -> None:
        self._history, self._ready = history, ready
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="patches")
        self._kept: weakref.WeakValueDictionary[tuple[int, int], Parcel] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._jobs: dict[int, Future[Parcel]] = {}  # by base: followers at one version share the work
        self.seconds = 0.0  # that a patch from a version takes, about
        self.keyframe_seconds = 0.0

    def start(self, order: Order) -> Future[Parcel]:
        """Return a future for the parcel of an order, shared with others that are waiting for the same."""
        self._jobs = {base: job for base, job in self._jobs.items() if not job.done()}
        found = self._jobs.get(order.base)
        if found is None:
            found = self._jobs[order.base] = self._pool.submit(self._make, order.base, not order.compare)
            found.add_done_callback(lambda _: self._ready())
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
        """End the thread once it is done with what it makes."""
        self._pool.shutdown(cancel_futures=True)

    def _make(self, base: int, mark: bool) -> Parcel:
        began = monotonic()
        patch = self._history.patch(base or None, mark)
        found = self.kept(patch.base, patch.version, patch.hash)
        if found is None:
            numbers = (patch.base, patch.base_hash, patch.version, patch.hash)
            found = Parcel(*numbers, patch.body, patch.head())
            with self._lock:
                self._kept[patch.base, patch.version] = found
        self._took(monotonic() - began, patch.base)
        return found

    def _took(self, seconds: float, base: int) -> None:
        if base:
            self.seconds += FORGET * (seconds - self.seconds)
        else:
            self.keyframe_seconds = seconds
