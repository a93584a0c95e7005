"""The trainer's end of rollouts elsewhere: prompts go to workers that follow its weights, and come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from thinwire.links.hub.hub import Hub
from thinwire.links.hub.station import EventKind
from thinwire.types import Closing, InputError, LinkError, PayloadError, ThinwireError, require
from thinwire.uses.following.hosts import rollout_messages as messages
from thinwire.uses.following.hosts.rollout_batch import (
    OpenBatch,
    PromptPart,
    RolloutAge,
    RolloutBatch,
    RolloutListener,
)
from thinwire.uses.following.hosts.rollout_messages import (
    ANY_AGE,
    Completions,
    Failed,
    Join,
    Prompts,
    Sample,
    Tokens,
    WaitsForWeights,
)

TIMEOUT = 600.0  # seconds for a batch
LOOK = 1.0  # seconds between two looks at the time
MOST_NBYTES = 1 << 28  # of a message


@dataclass
class RolloutPool(Closing):
    """Rollout workers that dial in, used as one function that generates.

    ``host``, ``port``: where to listen; off loopback a ``token`` is needed. ``max_age``: by how many versions
    a worker may be behind; one that is further behind waits for its weights, and says so. None: any age.
    ``timeout``: seconds for a batch. A worker that goes leaves its prompts to the others. ``record`` hears
    what happens, such as a ``RolloutRecorder``. ``ages`` has an entry for each part of each batch, ``notes``
    a sentence for each worker that had to wait, or that was lost. ``generate`` belongs to one thread.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: bytes | None = field(default=None, repr=False)
    max_age: int | None = None
    timeout: float = TIMEOUT
    record: RolloutListener | None = field(default=None, repr=False)
    ages: list[RolloutAge] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        good = self.max_age is None or 0 <= self.max_age < ANY_AGE
        require(good, InputError, f"max_age={self.max_age} versions; give 0 or more, or None for any age")
        require(self.timeout > 0, InputError, f"timeout={self.timeout} is not above 0 seconds; give more")
        self._hub = Hub.bind(self.host, self.port, token=self.token, max_message=MOST_NBYTES)
        self.port = self._hub.port
        self._workers: dict[bytes, str] = {}  # those that are ready, by name
        self._waited: set[bytes] = set()  # those of which a note says so
        self._batches = self._parts = 0
        self._closed = False
        if self.record is not None:
            try:
                self.record.begin({n: getattr(self, n) for n in ("host", "port", "max_age", "timeout")})
            except BaseException:
                self._hub.close()
                raise

    def generate(
        self,
        prompts: Sequence[Tokens],
        version: int,
        settings: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> list[Sample]:
        """Return a sample for each prompt (tokens), in order; ``version`` is the newest that is published.

        ``settings`` are the generating function's; ``step`` is the trainer's, for the record. Errors:
        ``LinkError`` where nobody is there, or not all comes within ``timeout``; ``ThinwireError`` naming the
        worker that cannot generate.
        """
        if not prompts:
            return []
        self._batches += 1
        batch = OpenBatch(self._batches, version, list(prompts), dict(settings or {}), step)
        before = self._nbytes()
        while self._hear(batch, 0.0):  # who came or went since the last batch
            pass
        while not batch.whole:
            self._hand_out(batch)
            self._hear(batch, max(0.0, min(LOOK, batch.began + self.timeout - monotonic())))
            self._check_time(batch)
        self._tell(batch, before)
        return batch.samples

    def rows(self) -> list[dict[str, Any]]:
        """Return ``ages`` as plain values."""
        return [asdict(age) for age in self.ages]

    def close(self) -> None:
        """Let the workers go, and end the record. Safe to call twice."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        closed, self._closed = self._closed, True
        self._hub.close()
        if self.record is not None and not closed:
            self.record.end(error)

    def _nbytes(self) -> tuple[int, int]:
        sent, received = self._hub.traffic()
        return sent.nbytes, received.nbytes

    def _tell(self, batch: OpenBatch, before: tuple[int, int]) -> None:
        sent, received = (now - then for now, then in zip(self._nbytes(), before, strict=True))
        seconds, parts = monotonic() - batch.began, tuple(batch.ages)
        if self.record is not None:
            done = (batch.number, batch.step, batch.version, batch.began, seconds, parts, sent, received)
            self.record.made(RolloutBatch(*done))

    def _note(self, text: str) -> None:
        self.notes.append(text)
        if self.record is not None:
            self.record.note(text)

    def _hand_out(self, batch: OpenBatch) -> None:
        """Give what waits to those that are there, in equal parts."""
        while batch.waiting and self._workers:
            there = list(self._workers)
            for peer, part in zip(there, batch.split(len(there)), strict=False):
                self._send(batch, peer, part)

    def _send(self, batch: OpenBatch, peer: bytes, part: PromptPart) -> None:
        self._parts += 1
        oldest = ANY_AGE if self.max_age is None else self.max_age
        body = messages.pack_prompts(part.prompts, batch.settings)
        part.peer, part.given = peer, monotonic()
        batch.given[self._parts] = part
        if not self._hub.send(peer, Prompts(self._parts, batch.version, oldest, body).pack()):
            self._lose(batch, peer, "it takes no more")

    def _hear(self, batch: OpenBatch, timeout: float) -> bool:
        """Take in one thing that workers do within ``timeout`` seconds; return whether there was one."""
        event = self._hub.recv(timeout)
        if event is None:
            return False
        if event.kind is EventKind.LOST:
            self._lose(batch, event.peer, event.data.decode(errors="replace"))
        elif event.kind is EventKind.DATA:
            self._take(batch, event.peer, event.data)
        return True

    def _check_time(self, batch: OpenBatch) -> None:
        if batch.whole or monotonic() < batch.began + self.timeout:
            return
        waits = {False: "", True: f", which waits for version {batch.version - (self.max_age or 0)}"}
        there = ", ".join(f"{self._name(p.peer)}{waits[p.waits]}" for p in batch.given.values())
        who = (
            f"rollout workers ({there}) did not answer"
            if there
            else f"no rollout worker dialled port {self.port}"
        )
        raise LinkError(f"{who} within {self.timeout:g} s; see whether they run and reach this machine")

    def _name(self, peer: bytes) -> str:
        return self._workers.get(peer) or self._hub.describe(peer)

    def _lose(self, batch: OpenBatch, peer: bytes, why: str) -> None:
        """Go on without a worker: what it had goes to the others."""
        name, prompts = self._workers.pop(peer, None), batch.take_back(peer)
        if name is None:
            return
        if prompts:
            told = f"worker {name} was lost in batch {batch.number}: {why}"
            self._note(f"{told}; the {prompts} prompts that it had go to others")
        if self.record is not None:
            self.record.went(name, prompts)

    def _take(self, batch: OpenBatch, peer: bytes, data: bytes) -> None:
        try:
            message = messages.unpack(data)
            if isinstance(message, Completions):
                self._put(batch, peer, message)
        except PayloadError as e:
            self._lose(batch, peer, f"it said what makes no sense ({e})")  # and gets no more prompts
            self._hub.forget(peer)
            return
        if isinstance(message, Join):
            self._join(peer, message)
        elif isinstance(message, WaitsForWeights) and message.part in batch.given:
            self._wait(batch, peer, message)
        elif isinstance(message, Failed) and message.part in batch.given:
            why = bytes(message.why).decode(errors="replace")
            raise ThinwireError(f"rollout worker {self._name(peer)}: {why:.500}")

    def _join(self, peer: bytes, message: Join) -> None:
        own, theirs = messages.PROTOCOL, message.protocol
        told = f"{self._name(peer)} speaks protocol {theirs}, this end {own}: install the same thinwire"
        require(theirs == own, InputError, told)
        if peer not in self._workers:
            self._workers[peer] = self._name(peer)
            if self.record is not None:
                self.record.came(self._workers[peer])

    def _wait(self, batch: OpenBatch, peer: bytes, message: WaitsForWeights) -> None:
        """Note that a worker waits, once each; not that it waits for the first version that it ever has."""
        batch.given[message.part].waits = True
        if message.version and peer not in self._waited:
            self._waited.add(peer)
            behind = f"{batch.version - message.version} behind, beyond max_age={self.max_age}"
            held = f"it had version {message.version}, {behind}"
            self._note(f"worker {self._name(peer)} waited for weights from batch {batch.number} on: {held}")

    def _put(self, batch: OpenBatch, peer: bytes, message: Completions) -> None:
        age = batch.put(peer, self._name(peer), message)
        if age is not None:
            self.ages.append(age)

    def _leave(self, error: BaseException | None) -> None:
        self._end(error)
