"""The policy behind ``auto``, ours: of all plans, the one that comes to a loss soonest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean

from thinwire.choosing.difference_codes import DENSE_COSTS, FACTOR_COSTS
from thinwire.spec import Spec
from thinwire.types import InputError, require
from thinwire.uses.training.replicas.choosing.replica_policy import ReplicaChoice, ReplicaSite
from thinwire.uses.training.replicas.choosing.time_model import Ranks, in_use, predicted_step, undecided

# A cost is how many times the steps of an exact mean training needs to the same loss. Each has its source
# behind it: "probe" is one seed of gpt2-lab with AdamW, 60 steps, or of a CNN with plain SGD; "measured" is
# the same with this engine, held-out 6.359, 6.379 and 6.400 nats for 10, 20 and 50 local steps, at .0045 nats
# a step; "derived" is read off the probe's curve; "assumed" is a guess of ours that waits for a measurement.
LOCAL_STEPS = {5: 0.98, 10: 1.0, 20: 1.07, 50: 1.15}  # 5 by a probe, the others measured
HIDDEN = (0, 1, 2, 5, 10, 20, 50)  # steps behind which a round's message may travel, a round at most
HIDDEN_COST = 0.15  # of a whole round: measured, 6.390 nats for 10 of 10 steps, 6.437 for 20 of 20
STALENESS = {0: 1.0, 1: 1.02, 2: 1.04, 3: 1.15, 4: 1.3}  # probe: fine up to 2, unstable between 2 and 4
ROUNDS = 7  # of a run at least, where local steps are raised: what is shared is half a round old


@dataclass(frozen=True)
class Code:
    """A way to code a message, and what it costs training."""

    ratio: float | None
    bits: float | None
    cost: float
    rank: int | None = None

    def choice(self, staleness: int, local_steps: int) -> ReplicaChoice:
        """Return the choice of this code for a plan."""
        return ReplicaChoice(self.ratio, self.bits, staleness, local_steps, "", rank=self.rank)

    def made(self, choice: ReplicaChoice) -> bool:
        """Say whether ``choice`` is of this code."""
        return (self.ratio, self.bits, self.rank) == (choice.ratio, choice.bits, choice.rank)


# Top 1 to 3 % of the differences cost 2.5 to 4 times the steps (derived), and take as much as 0.6 bits do.
FACTORS = tuple(Code(None, None, cost, rank) for rank, cost in FACTOR_COSTS.items())
DENSE = tuple(Code(None, bits, cost) for bits, cost in DENSE_COSTS.items())
DIFFERENCES = (*DENSE, *FACTORS)
GRADIENTS = (Code(0.1, None, 1.0), Code(0.01, None, 1.02), Code(0.001, None, 1.04))  # assumed, probe, probe


@dataclass(frozen=True)
class ReplicaPlan:
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
        return [code.choice(self.staleness, self.local_steps) for code in self.codes]


@dataclass(frozen=True, repr=False)
class Auto(Spec):
    """Choose the delay, local steps and each rank's code that come to a loss soonest.

    The time to a loss is a step's seconds, as many times as the plan needs more steps. A plan in use stays
    for as long as it is within ``slack`` of the best on this link, or on one by the ``margin`` quicker or
    slower. ``gradients``: whether the optimiser bears sparse and late gradients, as SGD without momentum
    does; else differences of parameters travel.

    >>> site = ReplicaSite(values=4_470_272, replicas=2, compute=0.307, coding=0.09, rate=4.8e6, delay=0.05)
    >>> Auto().choose([site])[0].reason
    'link 4.8 MB/s, 50 ms; 603 kB every 10 steps take 0.18 s of 3.1 s, behind the next 1'
    """

    every: int = 20  # steps
    gradients: bool = False
    slack: float = 0.02  # of the time to a loss
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
        ranks, used = Ranks.of(sites), self._used(sites)
        stays = used is not None and any(self._is_near(used, near) for near in self._near(ranks))
        plan = used if used and stays else self._best(ranks)
        return ranks.explained(plan.choices)

    def _start(self, sites: Sequence[ReplicaSite]) -> ReplicaChoice:
        """Return what is small on any link, and does no harm on a quick one."""
        code, named = DENSE[0], "1.2 bits"
        if self.gradients:
            code, named = GRADIENTS[1], "top 1 %"
        elif all(site.sides for site in sites):
            code, named = FACTORS[0], f"rank {FACTORS[0].rank}"
        why = f"not measured yet: a safe start, {named} without delay"
        return replace(code.choice(0, self._local_steps(sites)[0]), reason=why)

    def _local_steps(self, sites: Sequence[ReplicaSite]) -> list[int]:
        """Return the numbers of local steps to weigh: no more than the run has, and a few rounds at least."""
        if self.gradients:
            return [1]
        steps = min((s.steps for s in sites if s.steps), default=ROUNDS * max(LOCAL_STEPS))
        least, *more = LOCAL_STEPS
        return [min(least, steps), *(h for h in more if h * ROUNDS <= steps)]

    def _used(self, sites: Sequence[ReplicaSite]) -> ReplicaPlan | None:
        """Return the plan in use, if it was chosen here from measurements."""
        last, codes = in_use(sites), GRADIENTS if self.gradients else DIFFERENCES
        if last is None or any(c.predicted is None for c in last):
            return None
        used = tuple(code for c in last for code in codes if code.made(c))
        mine = len(used) == len(last) and (last[0].staleness in STALENESS or not self.gradients)
        return ReplicaPlan(last[0].staleness, last[0].local_steps, used) if mine else None

    def _near(self, ranks: Ranks) -> Iterator[Ranks]:
        paces = (1.0, 1 + self.margin, 1 / (1 + self.margin))
        return (ranks.paced(wire, delay) for wire, delay in product(paces, paces))

    def _is_near(self, plan: ReplicaPlan, ranks: Ranks) -> bool:
        return _score(ranks, plan) <= (1 + self.slack) * _score(ranks, self._best(ranks))

    def _best(self, ranks: Ranks) -> ReplicaPlan:
        return min(self._plans(ranks), key=lambda plan: _score(ranks, plan))

    def _plans(self, ranks: Ranks) -> Iterator[ReplicaPlan]:
        """Yield every delay and number of local steps, each with the best code for every rank."""
        for steps in self._local_steps(ranks.sites):
            for late in STALENESS if self.gradients else (h for h in HIDDEN if h <= steps):
                yield ReplicaPlan(late, steps, tuple(self._code(site, late, steps) for site in ranks.sites))

    def _code(self, site: ReplicaSite, late: int, steps: int) -> Code:
        def score(code: Code) -> float:
            return predicted_step(site, code.choice(late, steps)) * code.cost

        seen = [code for code in DIFFERENCES if code.rank is None or site.sides]
        return min(GRADIENTS if self.gradients else seen, key=score)


def _score(ranks: Ranks, plan: ReplicaPlan) -> float:
    """Return the time to a loss, in steps of an exact mean: what a step takes, times the plan's cost."""
    return ranks.step(plan.choices) * plan.cost
