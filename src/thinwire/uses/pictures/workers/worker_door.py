"""Who asks at a worker's port: hosts, one at a time; a second one is told that the worker is busy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

from thinwire.links.hub.hub import Hub
from thinwire.links.hub.station import EventKind
from thinwire.links.mesh import Peer
from thinwire.types import LinkError, PayloadError, require
from thinwire.uses.pictures.workers.worker_words import WorkerJob, WorkerWord, pack, unpack

TICK = 0.25  # seconds
Words = tuple[WorkerWord, dict[str, Any]]


class HostVisit:
    """One host, from when it asks until it is gone."""

    def __init__(self, hub: Hub, peer: bytes, job: WorkerJob) -> None:
        self.job, self.name = job, f"the host {hub.describe(peer)}"
        self._hub, self._peer = hub, peer
        self._words: SimpleQueue[Words] = SimpleQueue()
        self._gone, self._why = Event(), ""
        self._peers: Mapping[int, Peer] = {}
        self._lock = Lock()

    @property
    def gone(self) -> bool:
        """Whether the host has left."""
        return self._gone.is_set()

    def say(self, word: WorkerWord, **values: Any) -> None:
        """Tell the host something, should it still be there."""
        self._hub.send(self._peer, pack(word, **values))

    def hear(self, timeout: float = 0.0) -> Words | None:
        """Return what the host has said next, or None. Errors: ``LinkError`` once it has left."""
        try:
            return self._words.get(timeout=timeout) if timeout else self._words.get_nowait()
        except Empty:
            require(not self.gone, LinkError, f"{self.name} has left: {self._why}")
            return None

    def wait(self, word: WorkerWord, deadline: float, others: Callable[[Words], object]) -> None:
        """Wait for a word of the host; ``others`` is given those that come before."""
        end = monotonic() + deadline
        while (found := self.hear(TICK)) is None or found[0] is not word:
            if found is not None:
                others(found)
            require(monotonic() < end, LinkError, f"waited {deadline:g} s for {self.name} to go on")

    def over(self, peers: Mapping[int, Peer]) -> None:
        """Let whoever waits for one of these peers hear at once when the host leaves."""
        with self._lock:
            self._peers = peers
        if self.gone:
            self.end(self._why)

    # the door's thread

    def heard(self, words: Words) -> None:
        """Take what the host has said."""
        self._words.put(words)

    def end(self, why: str) -> None:
        """Note that the host has left."""
        self._why = why
        self._gone.set()
        with self._lock:
            for peer in self._peers.values():
                peer.mailbox.fail(LinkError(f"{self.name} has left: {why}"))

    def of(self, peer: bytes) -> bool:
        """Return whether this is the host behind a connection."""
        return peer == self._peer


class WorkerDoor:
    """Read what comes to a hub, on a thread, and hand out the visits of hosts one after the other."""

    def __init__(self, hub: Hub, tell: Callable[[str], object]) -> None:
        self._hub, self._tell = hub, tell
        self._visits: SimpleQueue[HostVisit] = SimpleQueue()
        self._now: HostVisit | None = None
        self._thread = Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def next(self, timeout: float = TICK) -> HostVisit | None:
        """Return the visit of the next host, or None. Errors: ``LinkError`` where the hub has failed."""
        require(self._thread.is_alive(), LinkError, f"the worker's port has failed: {self._hub.error}")
        with suppress(Empty):
            return self._visits.get(timeout=timeout)
        return None

    def close(self) -> None:
        """Listen no more."""
        self._hub.close()
        self._thread.join()

    def _run(self) -> None:
        with suppress(LinkError):  # the hub is closed, or has failed
            while True:
                event = self._hub.recv(1.0)
                if event is not None and event.kind is EventKind.DATA:
                    self._take(event.peer, event.data)
                elif event is not None and event.kind is EventKind.LOST and self._is_now(event.peer):
                    self._now.end(event.data.decode(errors="replace"))  # type: ignore[union-attr]

    def _take(self, peer: bytes, data: bytes) -> None:
        try:
            word, values = unpack(data, self._hub.describe(peer))
            if word is WorkerWord.BEGIN:
                self._begin(peer, WorkerJob.of(values))
            elif self._is_now(peer) and not self._now.gone:  # type: ignore[union-attr]
                self._now.heard((word, values))  # type: ignore[union-attr]
        except PayloadError as e:
            self._refuse(peer, str(e))

    def _is_now(self, peer: bytes) -> bool:
        return self._now is not None and self._now.of(peer)

    def _begin(self, peer: bytes, job: WorkerJob) -> None:
        if self._now is not None and not self._now.gone:
            self._refuse(peer, f"it is busy for {self._now.name}; try again when that has ended", busy=True)
            return
        self._now = HostVisit(self._hub, peer, job)
        self._visits.put(self._now)

    def _refuse(self, peer: bytes, why: str, busy: bool = False) -> None:
        self._tell(f"the host {self._hub.describe(peer)} was refused: {why}")
        self._hub.send(peer, pack(WorkerWord.REFUSED, text=why, busy=busy))
