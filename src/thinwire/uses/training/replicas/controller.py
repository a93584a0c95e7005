"""When to exchange and how: a plan that rank 0 announces, and the codec that each rank takes by itself.

Every message says what its sender measured, so rank 0 knows all sites without asking. Its plan travels in the
head of its next message and holds from where that message is applied: no round trip, and no rank can differ.

A message has a small head, then packets that describe themselves. Little-endian::

    version u8 (1), state u8 (0: values follow; 1: the sender's values are not finite; 2 more: the sender
    takes back what it sent since its last step; 4 more: it drains, and waits until all do), packets u16
    what rank 0 plans: staleness u16, local steps u16 (others repeat what holds)
    what the sender measured, NaN where it did not yet: seconds of compute a step and of coding an exchange,
    bytes/s of its uplink, seconds of one way, f32 each
    each packet: length u32, bytes as ``channels/wire.py`` has them
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from thinwire.codecs import Codec
from thinwire.collectives.exchange import Framing
from thinwire.uses.training.replicas.choosing.replica_policy import ReplicaChoice, ReplicaPolicy, ReplicaSite

MESSAGES = Framing(version=1, states=8, fields="HH4f")
KEPT = 9  # readings whose median counts
LINKS = 3  # the same of the link, one a message: a late answer feigns a slow link, but not twice
Link = Callable[[], tuple[float | None, float | None]]


@dataclass(frozen=True)
class PlanChange:
    """A change of the plan: the step after which it was decided, what was chosen, and what was measured."""

    step: int
    choice: ReplicaChoice
    site: ReplicaSite


class Controller:
    """The plan of a run without a policy: it never changes."""

    def __init__(self, staleness: int, local_steps: int) -> None:
        self.staleness, self.local_steps = staleness, local_steps
        self.codec: Codec | None = None
        self.begun: PlanChange | None = None  # how it starts, where a policy says so

    def measured(self, compute: float, coding: float) -> None:
        """Take the seconds of a step's compute, and of coding an exchange."""

    def head(
        self, packets: Sequence[bytes], finite: bool = True, undoes: bool = False, drains: bool = False
    ) -> ExchangeMessage:
        """Return the message that takes ``packets`` to the others."""
        plan = self.staleness, self.local_steps
        return ExchangeMessage(*plan, Measurement(), packets, finite, undoes, drains)

    def heard(self, messages: Mapping[int, ExchangeMessage]) -> None:
        """Take over rank 0's plan, as these messages of all ranks are applied."""
        first = messages[min(messages)]
        self.staleness, self.local_steps = first.staleness, first.local_steps

    def decide(self, step: int) -> PlanChange | None:
        """Choose anew after ``step``, where it is time to; return what changed."""
        return None


class AdaptiveController(Controller):
    """A plan that a policy is asked for between two exchanges; the policy knows when it is time for another.

    ``coded`` makes the codec of a choice; ``link`` returns this rank's uplink, bytes/s, and its one-way
    delay, seconds, as far as known; ``own`` is this rank's site, with nothing measured yet.
    """

    def __init__(
        self,
        policy: ReplicaPolicy,
        coded: Callable[[ReplicaChoice], Codec],
        link: Link,
        rank: int,
        ranks: tuple[int, ...],
        own: ReplicaSite,
    ) -> None:
        super().__init__(0, 1)  # until the policy has chosen, below
        self._policy, self._coded, self._link = policy, coded, link
        self._rank, self._ranks = rank, ranks
        self._sites = dict.fromkeys(ranks, own)
        self._compute: deque[float] = deque(maxlen=KEPT)
        self._coding: deque[float] = deque(maxlen=KEPT)
        self._rates: deque[float] = deque(maxlen=LINKS)
        self._delays: deque[float] = deque(maxlen=LINKS)
        self._posted = False  # a message since the last decision
        first = self._choose(0)
        self.staleness, self.local_steps = self._planned = first.staleness, first.local_steps
        self.begun = PlanChange(0, first, own)

    def measured(self, compute: float, coding: float) -> None:
        self._compute.append(compute)
        if coding:
            self._coding.append(coding)

    def head(
        self, packets: Sequence[bytes], finite: bool = True, undoes: bool = False, drains: bool = False
    ) -> ExchangeMessage:
        self._posted = True
        for known, value in zip((self._rates, self._delays), self._link(), strict=True):
            if value is not None:
                known.append(value)
        leads = self._rank == min(self._ranks)
        plan = self._planned if leads else (self.staleness, self.local_steps)
        return ExchangeMessage(*plan, self._measured(), packets, finite, undoes, drains)

    def _measured(self) -> Measurement:
        known = (self._compute, self._coding, self._rates, self._delays)
        return Measurement(*(median(values) if values else math.nan for values in known))

    def heard(self, messages: Mapping[int, ExchangeMessage]) -> None:
        super().heard(messages)
        for rank, message in messages.items():
            self._sites[rank] = _told(self._sites[rank], message.measured)

    def decide(self, step: int) -> PlanChange | None:
        if not self._posted:
            return None
        self._posted = False
        before = self._sites[self._rank].last
        self._sites[self._rank] = _told(self._sites[self._rank], self._measured())
        choice = self._choose(step)
        self._planned = choice.staleness, choice.local_steps
        same = before is not None and replace(choice, reason="", predicted=None) == replace(
            before, reason="", predicted=None
        )
        return None if same else PlanChange(step, choice, self._sites[self._rank])

    def _choose(self, step: int) -> ReplicaChoice:
        sites = [replace(self._sites[rank], step=step) for rank in self._ranks]
        choices = dict(zip(self._ranks, self._policy.choose(sites), strict=True))
        for rank, choice in choices.items():
            self._sites[rank] = replace(self._sites[rank], last=choice)
        own = choices[self._rank]
        self.codec = self._coded(own)
        return own


def _told(site: ReplicaSite, measured: Measurement) -> ReplicaSite:
    """Return the site with what its rank measured, as far as it did."""
    known = {name: value for name, value in vars(measured).items() if not math.isnan(value)}
    return replace(site, **known)


@dataclass(frozen=True)
class Measurement:
    """What a replica knows of its own speed: seconds a step and a coding, bytes/s and seconds of its link."""

    compute: float = math.nan
    coding: float = math.nan
    rate: float = math.nan
    delay: float = math.nan


@dataclass(frozen=True)
class ExchangeMessage:
    """What one replica tells the others in one exchange."""

    staleness: int
    local_steps: int
    measured: Measurement
    packets: Sequence[bytes | memoryview] = ()
    finite: bool = True
    undoes: bool = False
    drains: bool = False

    def pack(self) -> bytes:
        """Return the message as bytes."""
        m = self.measured
        state = (not self.finite) + 2 * self.undoes + 4 * self.drains
        measured = m.compute, m.coding, m.rate, m.delay
        return MESSAGES.pack(state, self.packets, self.staleness, self.local_steps, *measured)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> ExchangeMessage:
        """Read what ``pack`` wrote; ``PayloadError`` for anything else."""
        state, packets, (staleness, local_steps, *measured) = MESSAGES.unpack(data)
        said = not state & 1, bool(state & 2), bool(state & 4)
        return cls(staleness, local_steps, Measurement(*measured), packets, *said)
