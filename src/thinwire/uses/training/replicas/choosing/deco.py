"""The policy behind ``deco``: the ratio and the delay at which nothing waits and the least noise is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

from thinwire.spec import Spec
from thinwire.types import InputError, require
from thinwire.uses.training.replicas.choosing.replica_policy import KEPT_BITS, ReplicaChoice, ReplicaSite
from thinwire.uses.training.replicas.choosing.time_model import (
    SECONDS,
    Ranks,
    delayed_step,
    in_use,
    undecided,
)

MOST_STALENESS = 16
LEAST_RATIO = 1e-4
START = ReplicaChoice(0.01, None, 0, 1, "not measured yet: a safe start of ours, top 1 % without delay")
LITTLE = 0.5  # noise: where it is less, another delay gains nothing
NEARLY = 1.01  # of the quickest step: what needs less delay is taken instead


def paper_noise(ratio: float, staleness: int) -> float:
    """Return DeCo's noise factor by two second-hand sources; it would rise again beyond 1/staleness."""
    ratio = min(ratio, 1 / max(1, staleness))
    return float((1 - ratio) ** (1 - staleness) / ratio)


def derived_noise(ratio: float, staleness: int) -> float:
    """Return our factor, derived from how much top-k with error feedback keeps."""
    return float((1 - ratio) / (ratio * (1 - ratio / 2) ** staleness))


NOISE: Mapping[str, Callable[[float, int], float]] = MappingProxyType(
    {"paper": paper_noise, "derived": derived_noise}
)


@dataclass(frozen=True, repr=False)
class Deco(Spec):
    """Choose ratio and delay anew every so many steps: no bubble on the slowest uplink, and the least noise.

    Of each delay, the largest ratio that leaves no bubble, even where messages take ``margin`` longer than
    measured; of these pairs, the one of least noise. A delay in use stays as long as it lies between those of
    links ``margin`` quicker and slower. Each rank's ratio follows its own rate.

    >>> site = ReplicaSite(values=10**6, replicas=2, compute=0.1, rate=2.5e6, delay=0.03)
    >>> choice = Deco().choose([site])[0]
    >>> choice.staleness, round(choice.ratio, 4), choice.reason
    (2, 0.0762, 'link 2.5 MB/s, 30 ms; 200 kB a step take 0.11 s of 0.1 s, 2 late')
    """

    every: int = 20  # steps
    noise: str = "paper"
    margin: float = 0.25  # of the time that messages take

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every >= 1, InputError, f"every={self.every} is below 1; give a number of steps")
        known = " or ".join(NOISE)
        require(self.noise in NOISE, InputError, f"noise={self.noise!r} is no noise factor; give {known}")
        wrong = f"margin={self.margin} is below 0; give a share of the time that messages take"
        require(self.margin >= 0, InputError, wrong)

    def choose(self, sites: Sequence[ReplicaSite]) -> Sequence[ReplicaChoice]:
        """Return a choice for each rank: one delay for all, the ratio by each rank's own uplink."""
        same = undecided(sites, self.every, START)
        if same is not None:
            return same
        ranks = Ranks.of(sites)
        staleness = self._staleness(ranks)
        if (last := in_use(sites)) and last[0].predicted is not None and last[0].local_steps == 1:
            paces = (1 + self.margin, 1.0, 1 / (1 + self.margin))
            near = [self._staleness(ranks.paced(wire, delay)) for wire, delay in product(paces, paces)]
            used = last[0].staleness
            staleness = used if min(near) <= used <= max(near) else staleness
        lines = self._lines(ranks)
        ratios = [self._best(line, staleness) for line in lines]
        return ranks.explained([ReplicaChoice(ratio, None, staleness, 1, "") for ratio in ratios])

    def _staleness(self, ranks: Ranks) -> int:
        """Return the delay for all ranks, by the slowest uplink and the longest way."""
        lines = self._lines(ranks)
        line = _Line(lines[0].compute, max(x.wire for x in lines), max(x.delay for x in lines))
        pairs = [(line.without_bubble(s), s) for s in range(MOST_STALENESS + 1)]
        fit = [(max(LITTLE, self._noise(self._limited(r, s), s)), s) for r, s in pairs if r >= LEAST_RATIO]
        if fit:
            return min(fit)[1]
        # Nothing hides: the least delay that is nearly as quick as the longest one.
        steps = [line.step(self._limited(line.full, s), s) for s in range(MOST_STALENESS + 1)]
        return next(s for s, step in enumerate(steps) if step <= NEARLY * min(steps))

    def _lines(self, ranks: Ranks) -> list[_Line]:
        # A line that is busy all the time makes steps wait wherever one takes longer than the mean.
        return [_Line.of(site, 1 + self.margin) for site in ranks.sites]

    def _best(self, line: _Line, staleness: int) -> float:
        """Return the ratio that leaves no bubble; where that costs too much, the one that fills the link."""
        calm, full = (self._limited(r, staleness) for r in (line.without_bubble(staleness), line.full))
        costs = [line.step(r, staleness) * self._noise(r, staleness) for r in (calm, full)]
        return calm if costs[0] <= (1 + self.margin) * costs[1] else full

    def _limited(self, ratio: float, staleness: int) -> float:
        most = 1 / staleness if self.noise == "paper" and staleness else 1.0
        return min(max(ratio, LEAST_RATIO), most)

    def _noise(self, ratio: float, staleness: int) -> float:
        return NOISE[self.noise](ratio, staleness)


@dataclass(frozen=True)
class _Line:
    """An uplink: seconds of compute and coding, of all values as kept ones, and of the way."""

    compute: float
    wire: float
    delay: float

    @classmethod
    def of(cls, site: ReplicaSite, longer: float) -> _Line:
        """Return the uplink of a site, whose messages take ``longer`` than measured."""
        seconds = (site.replicas - 1) * site.values * KEPT_BITS / 8 / (site.rate or SECONDS)
        return cls(site.compute + site.coding, longer * seconds, site.delay or 0.0)

    @property
    def full(self) -> float:
        """The ratio whose messages keep the link busy all the time."""
        return min(1.0, self.compute / self.wire) if self.wire else 1.0

    def without_bubble(self, staleness: int) -> float:
        """Return the largest ratio that never makes a step wait; it is not positive where there is none."""
        spare = staleness * self.compute - self.delay
        return min(self.full, spare / self.wire) if self.wire else float(spare >= 0)

    def step(self, ratio: float, staleness: int) -> float:
        return delayed_step(self.compute, ratio * self.wire, self.delay, staleness)
