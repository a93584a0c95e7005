"""The trainer's end of rollouts elsewhere: prompts go to workers that follow its weights, and come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from types import TracebackType
from typing import Any, Self

from thinwire.links.hub.hub import Hub
from thinwire.links.hub.station import EventKind
from thinwire.types import InputError, LinkError, PayloadError, ThinwireError, require
from thinwire.uses.following.hosts import rollout_messages as messages
from thinwire.uses.following.hosts.rollout_messages import (
    ANY_AGE,
    Completions,
    Failed,
    Join,
    Prompts,
    Sample,
    Tokens,
)

TIMEOUT = 600.0  # seconds for a batch
MOST_NBYTES = 1 << 28  # of a message


@dataclass(frozen=True)
class RolloutAge:
    """How old the weights were that made a part of a batch.

    ``version``: the one that a worker used; ``behind``: how many the trainer had published since; ``age``:
    seconds since it was published, by the publisher's clock; ``waited``: seconds that the worker waited for
    it, because an older one was beyond ``max_age``; ``samples``: how many it made.
    """

    batch: int
    worker: str
    version: int
    behind: int
    age: float
    waited: float
    samples: int


@dataclass
class _Part:
    at: int  # the first prompt's place
    prompts: Sequence[Tokens]
    peer: bytes = b""


@dataclass
class RolloutPool:
    """Rollout workers that dial in, used as one function that generates.

    ``host``, ``port``: where to listen; off loopback a ``token`` is needed. ``max_age``: by how many versions
    a worker may be behind; one that is further behind waits for its weights, and says how long. None: any
    age. ``timeout``: seconds for a batch. A worker that goes leaves its prompts to the others. ``ages`` has
    an entry for each part of each batch. ``generate`` belongs to one thread.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: bytes | None = field(default=None, repr=False)
    max_age: int | None = None
    timeout: float = TIMEOUT
    ages: list[RolloutAge] = field(default_factory=list)

    def __post_init__(self) -> None:
        good = self.max_age is None or 0 <= self.max_age < ANY_AGE
        require(good, InputError, f"max_age={self.max_age} versions; give 0 or more, or None for any age")
        require(self.timeout > 0, InputError, f"timeout={self.timeout} is not above 0 seconds; give more")
        self._hub = Hub.bind(self.host, self.port, token=self.token, max_message=MOST_NBYTES)
        self.port = self._hub.port
        self._ready: list[bytes] = []  # workers, whose turn comes first
        self._batch = self._parts = 0

    def generate(
        self, prompts: Sequence[Tokens], version: int, settings: Mapping[str, Any] | None = None
    ) -> list[Sample]:
        """Return a sample for each prompt (tokens), in order; ``version`` is the newest that is published.

        ``settings`` are the generating function's. Errors: ``LinkError`` where nobody is there, or not all
        comes within ``timeout``; ``ThinwireError`` naming the worker that cannot generate.
        """
        self._batch += 1
        self._end, self._left = monotonic() + self.timeout, dict[int, _Part]()
        self._waiting = [_Part(0, list(prompts))]
        self._made: list[Sample | None] = [None] * len(prompts)
        oldest = ANY_AGE if self.max_age is None else self.max_age
        while any(made is None for made in self._made):
            self._hand_out(version, oldest, dict(settings or {}))
            self._hear(version)
        return [made for made in self._made if made is not None]

    def rows(self) -> list[dict[str, Any]]:
        """Return ``ages`` as plain values."""
        return [asdict(age) for age in self.ages]

    def close(self) -> None:
        """Let the workers go. Safe to call twice."""
        self._hub.close()

    def _hand_out(self, version: int, oldest: int, settings: Mapping[str, Any]) -> None:
        """Give what waits to those that are there, in equal parts."""
        while self._waiting and self._ready:
            part, many = self._waiting.pop(), len(self._ready)
            each = -(-len(part.prompts) // many)
            for i, peer in enumerate(self._ready):
                own = part.prompts[i * each : (i + 1) * each]
                if own:
                    self._send(_Part(part.at + i * each, own, peer), version, oldest, settings)

    def _send(self, part: _Part, version: int, oldest: int, settings: Mapping[str, Any]) -> None:
        self._parts += 1
        body = messages.pack_prompts(part.prompts, settings)
        if self._hub.send(part.peer, Prompts(self._parts, version, oldest, body).pack()):
            self._left[self._parts] = part
        else:
            self._lose(part.peer)
            self._waiting.append(part)

    def _hear(self, version: int) -> None:
        event = self._hub.recv(max(0.0, min(1.0, self._end - monotonic())))
        if event is None:
            self._check_end()
        elif event.kind is EventKind.LOST:
            self._lose(event.peer)
        elif event.kind is EventKind.DATA:
            self._take(event.peer, event.data, version)

    def _check_end(self) -> None:
        if monotonic() < self._end:
            return
        there = ", ".join(self._hub.describe(part.peer) for part in self._left.values())
        who = (
            f"rollout workers ({there}) did not answer"
            if there
            else f"no rollout worker dialled port {self.port}"
        )
        raise LinkError(f"{who} within {self.timeout:g} s; see whether they run and reach this machine")

    def _lose(self, peer: bytes) -> None:
        self._ready = [other for other in self._ready if other != peer]
        gone = [number for number, part in self._left.items() if part.peer == peer]
        self._waiting += [self._left.pop(number) for number in gone]

    def _take(self, peer: bytes, data: bytes, version: int) -> None:
        try:
            message = messages.unpack(data)
            if isinstance(message, Completions):
                self._put(peer, message, version)
        except PayloadError:
            self._lose(peer)  # whoever says what makes no sense gets no prompts
            self._hub.forget(peer)
            return
        if isinstance(message, Join):
            self._join(peer, message)
        elif isinstance(message, Failed) and message.part in self._left:
            why = bytes(message.why).decode(errors="replace")
            raise ThinwireError(f"rollout worker {self._hub.describe(peer)}: {why:.500}")

    def _join(self, peer: bytes, message: Join) -> None:
        own, theirs = messages.PROTOCOL, message.protocol
        told = (
            f"{self._hub.describe(peer)} speaks protocol {theirs}, this end {own}: install the same thinwire"
        )
        require(theirs == own, InputError, told)
        if peer not in self._ready:
            self._ready.append(peer)

    def _put(self, peer: bytes, message: Completions, version: int) -> None:
        part = self._left.get(message.part)
        if part is None or part.peer != peer:
            return  # of a batch that is over, or a part that another one has by now
        samples = messages.unpack_samples(message.body)
        short = f"{len(samples)} samples for {len(part.prompts)} prompts"
        require(len(samples) == len(part.prompts), PayloadError, short)
        del self._left[message.part]
        self._made[part.at : part.at + len(samples)] = samples
        behind, who = max(0, version - message.version), self._hub.describe(peer)
        self.ages.append(
            RolloutAge(self._batch, who, message.version, behind, message.age, message.waited, len(samples))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
