"""The policy behind ``auto``, ours: of what hides behind compute, what costs training least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from thinwire.policies.replicas.site import ReplicaChoice, ReplicaSite
from thinwire.policies.replicas.time_model import Ranks, in_use, predicted_step, undecided
from thinwire.spec import Spec
from thinwire.types import InputError, require

# A cost is how many times the steps of an exact mean training needs to the same loss. Each has its source
# behind it: "probe" is one seed of gpt2-lab with AdamW, 60 steps, or of a CNN with plain SGD; "measured" is
# the same with this engine, held-out 6.359, 6.379 and 6.400 nats for 10, 20 and 50 local steps, at .0045 nats
# a step; "derived" is read off the probe's curve; "assumed" is a guess of ours that waits for a measurement.
LOCAL_STEPS = {10: 1.0, 20: 1.07, 50: 1.15}  # measured
HIDDEN = (0, 1, 2, 5, 10, 20, 50)  # steps behind which a round's message may travel, a round at most
HIDDEN_COST = 0.15  # of a whole round: measured, 6.390 nats for 10 of 10 steps, 6.437 for 20 of 20
STALENESS = {0: 1.0, 1: 1.02, 2: 1.04, 3: 1.15, 4: 1.3}  # probe: fine up to 2, unstable between 2 and 4
ROUNDS = 5  # of a run at least, where local steps are raised


@dataclass(frozen=True)
class Code:
    """A way to code a message, and what it costs training."""

    ratio: float | None
    bits: float | None
    cost: float


# Top 1 to 3 % of the differences cost 2.5 to 4 times the steps (derived), and take as much as 0.6 bits do.
DIFFERENCES = (Code(None, 1.2, 1.0), Code(None, 0.6, 1.5))  # probe, derived
GRADIENTS = (Code(0.1, None, 1.0), Code(0.01, None, 1.02), Code(0.001, None, 1.04))  # assumed, probe, probe


@dataclass(frozen=True)
class Plan:
    """A delay and a number of local steps for all ranks, and a code for each."""

    staleness: int
    local_steps: int
    codes: tuple[Code, ...]

    @property
    def cost(self) -> float:
        code = mean(c.cost for c in self.codes)
        if self.local_steps == 1 and self.codes[0] in GRADIENTS:
            return code * STALENESS[self.staleness]
        local = LOCAL_STEPS.get(self.local_steps, 1.0)
        return code * local * (1 + HIDDEN_COST * self.staleness / self.local_steps)

    @property
    def choices(self) -> list[ReplicaChoice]:
        return [ReplicaChoice(c.ratio, c.bits, self.staleness, self.local_steps, "") for c in self.codes]


@dataclass(frozen=True, repr=False)
class Auto(Spec):
    """Choose delay, local steps and each rank's code: of what hides, what costs training least.

    What lengthens a step by at most ``slack`` hides. Where that costs more steps than it saves time, or
    nothing hides, it is the least product of both. What is chosen would hide on a link a ``margin`` slower.
    It stays until something of less cost, or anything once it no longer hides, would hide on a link slower by
    the margin twice, or something else is better by the margin. ``gradients``: whether the optimiser bears
    sparse and late gradients, as SGD without momentum does; else differences of parameters travel.

    >>> site = ReplicaSite(values=4_470_272, replicas=2, compute=0.307, coding=0.09, rate=4.8e6, delay=0.05)
    >>> Auto().choose([site])[0].reason
    'link 4.8 MB/s, 50 ms; 603 kB every 10 steps take 0.18 s of 3.1 s, behind the next 1'
    """

    every: int = 20  # steps
    gradients: bool = False
    slack: float = 0.05  # of a step's compute
    margin: float = 0.25  # of the time that messages take

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every >= 1, InputError, f"every={self.every} is below 1; give a number of steps")
        for name in ("slack", "margin"):
            value = getattr(self, name)
            require(0 <= value < 1, InputError, f"{name}={value} is not from 0 to below 1; give such a share")

    def choose(self, sites: Sequence[ReplicaSite]) -> Sequence[ReplicaChoice]:
        """Return a choice for each rank: one delay and number of local steps, the code by its own uplink."""
        same = undecided(sites, self.every, self._start(sites))
        if same is not None:
            return same
        ranks = Ranks.of(sites)
        return ranks.explained(self._decide(ranks, self._used(sites)).choices)

    def _start(self, sites: Sequence[ReplicaSite]) -> ReplicaChoice:
        code = GRADIENTS[1] if self.gradients else DIFFERENCES[0]
        why = f"not measured yet: a safe start, {'top 1 %' if self.gradients else '1.2 bits'} without delay"
        return ReplicaChoice(code.ratio, code.bits, 0, self._local_steps(sites)[0], why)

    def _local_steps(self, sites: Sequence[ReplicaSite]) -> list[int]:
        """Return the numbers of local steps to weigh: no more than the run has, and a few rounds at least."""
        if self.gradients:
            return [1]
        steps = min((s.steps for s in sites if s.steps), default=ROUNDS * max(LOCAL_STEPS))
        least, *more = LOCAL_STEPS
        return [min(least, steps), *(h for h in more if h * ROUNDS <= steps)]

    def _used(self, sites: Sequence[ReplicaSite]) -> Plan | None:
        """Return the plan in use, if it was chosen here from measurements."""
        last, codes = in_use(sites), GRADIENTS if self.gradients else DIFFERENCES
        if last is None or any(c.predicted is None for c in last):
            return None
        used = tuple(code for c in last for code in codes if (code.ratio, code.bits) == (c.ratio, c.bits))
        mine = len(used) == len(last) and (last[0].staleness in STALENESS or not self.gradients)
        return Plan(last[0].staleness, last[0].local_steps, used) if mine else None

    def _decide(self, ranks: Ranks, used: Plan | None) -> Plan:
        best = min(self._plans(ranks, hiding=False), key=lambda p: _score(ranks, p))
        if used is None:
            return self._hiding(ranks, 1 + self.margin, best) or best
        better = self._hiding(ranks, (1 + self.margin) ** 2, best)
        gains = better is not None and _score(ranks, better) <= _score(ranks, used)
        if better and gains and (better.cost < used.cost or not self._hides(ranks.step(used.choices), ranks)):
            return better
        limit = (1 + self.margin) * _score(ranks, best)
        return used if _score(ranks, used) <= limit else self._hiding(ranks, 1 + self.margin, best) or best

    def _hiding(self, ranks: Ranks, pace: float, best: Plan) -> Plan | None:
        """Return the plan of least cost that hides on links that much slower, unless ``best`` gains more."""
        slower = ranks.paced(pace, pace)
        hidden = [p for p in self._plans(slower, hiding=True) if self._hides(slower.step(p.choices), ranks)]
        plan = min(hidden, key=lambda p: (p.cost, ranks.step(p.choices)), default=None)
        near = plan and _score(ranks, plan) <= (1 + self.slack) * _score(ranks, best)
        return plan if near else None

    def _hides(self, step: float, ranks: Ranks) -> bool:
        return step <= (1 + self.slack) * ranks.compute

    def _plans(self, ranks: Ranks, hiding: bool) -> Iterator[Plan]:
        """Yield every delay and number of local steps, each with the best codes for them."""
        for steps in self._local_steps(ranks.sites):
            for late in STALENESS if self.gradients else (h for h in HIDDEN if h <= steps):
                yield Plan(late, steps, tuple(self._code(ranks, s, late, steps, hiding) for s in ranks.sites))

    def _code(self, ranks: Ranks, site: ReplicaSite, late: int, steps: int, hiding: bool) -> Code:
        """Return the code of least cost that hides on this rank's uplink, or that of least time and cost."""

        def step(code: Code) -> float:
            return predicted_step(site, ReplicaChoice(code.ratio, code.bits, late, steps, ""))

        codes = GRADIENTS if self.gradients else DIFFERENCES
        hidden = (c for c in codes if hiding and self._hides(step(c), ranks))  # of least cost first
        return next(hidden, None) or min(codes, key=lambda c: step(c) * c.cost)


def _score(ranks: Ranks, plan: Plan) -> float:
    """Return time to a loss: seconds a step, as many times as the plan needs more steps."""
    return ranks.step(plan.choices) * plan.cost
