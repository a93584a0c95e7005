"""The policy behind ``auto``: the finest rung that still hides behind compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from thinwire.choosing.policy import Rung
from thinwire.types import InputError, require
from thinwire.uses.training.pipeline.choosing.pipeline_policy import BoundarySite, Choice
from thinwire.uses.training.pipeline.choosing.replay import Hop, Pipeline, Stage, step_seconds

FORWARD_SHARE = 1 / 3  # of a stage's compute: a backward pass does two products for each of the forward's
LEAST = 0.05  # bits a value: headers remain
LITTLE = 0.005  # of a step: what is not worth a word
Levels = tuple[int, ...]


@dataclass(frozen=True)
class HideBehindCompute:
    """Give each site the finest rung that lengthens the step by at most ``tolerance`` a direction.

    Measured against the step that ``schedule.step_seconds`` foretells with every site at rung 0, the floor,
    so it neither lengthens the steady state nor the fill. All sites rise together, rung by rung, for as long
    as the sum of their costs stays within the tolerance; where nothing but the link is slow that is the
    floor, on a fast link the uncompressed rung. Where the rungs in use no longer fit, they fall at once; they
    rise only if the finer ones would fit at ``1 - margin`` of the rate too, ``patience`` decisions in a row.
    So a rate that wavers by 10 % either way changes next to nothing. Once something is known they rise at
    once, but only to what would fit at ``1 - doubt`` of the rate: one step may be a disturbed one.

    A site without any estimate yet stays on the floor; one whose estimate is lost or older than ``max_age``
    seconds stays where it is.

    >>> from thinwire.choosing.policy import BF16, EXACT
    >>> policy = HideBehindCompute((BF16, EXACT), (BF16, EXACT))
    >>> site = BoundarySite(0, 1, values=10**6, messages=4, rate=1e6, rtt=0.06, sender_s=1.0, receiver_s=1.0)
    >>> policy.choose([site])[0].reason
    '60 ms and 1.00 MB/s: the floor of 16.0 bits; 32.0 bits would add 79 % to the step'
    """

    forward: tuple[Rung, ...]
    backward: tuple[Rung, ...]
    tolerance: float = 0.01  # of the step, a direction
    margin: float = 0.2  # of the rate
    doubt: float = 0.5  # of the first rate, and of the first step
    patience: int = 3  # decisions
    max_age: float = 60.0  # seconds
    schedule: str = "eager1f1b"

    def __post_init__(self) -> None:
        require(bool(self.forward and self.backward), InputError, "a ladder without rungs; give one or more")
        for name in ("tolerance", "margin", "doubt"):
            value = getattr(self, name)
            require(0 <= value < 1, InputError, f"{name}={value} is not a share from 0 to below 1")

    def choose(self, sites: Sequence[BoundarySite]) -> list[Choice]:
        """Return a choice for each site of one pipeline; all of its sites are weighed together."""
        view = _View(self, tuple(sites))
        levels, streaks = self._decide(view) if view.is_timed else (view.current, view.unknown)
        return [self._choice(view, levels, k, streak) for k, streak in enumerate(streaks)]

    def under(self, schedule: str) -> HideBehindCompute:
        """Return this policy for a pipeline that runs by ``schedule``."""
        return replace(self, schedule=schedule)

    def ladder(self, site: BoundarySite) -> tuple[Rung, ...]:
        """Return the rungs of a site, the floor first."""
        return self.forward if site.is_forward else self.backward

    def _decide(self, view: _View) -> tuple[Levels, Levels]:
        """Return the rung and the streak of each site."""
        none = (0,) * len(view.sites)
        if not view.fits(view.current):
            lower = view.risen(view.floor)
            return tuple(min(pair) for pair in zip(view.current, lower, strict=True)), none
        finer, unknown = view.slower(self.margin).finer, view.unknown
        certain = view.slower(self.doubt).finer if min(unknown) < 0 else view.current
        levels, streaks = [], []
        for site, now, then, sure, kept in zip(
            view.sites, view.current, finer, certain, unknown, strict=True
        ):
            if kept < 0 and not view.is_held(site):
                kept, now = 0, sure
            streak = kept + 1 if then > now else kept * view.is_held(site)
            due = then > now and streak >= self.patience
            levels.append(then if due else now)
            streaks.append(0 if due else streak)
        return tuple(levels), tuple(streaks)

    def _choice(self, view: _View, levels: Levels, k: int, streak: int) -> Choice:
        rung = self.ladder(view.sites[k])[levels[k]]
        bits = view.bits(k, levels[k])
        why = partial(view.reason, levels, k, streak)
        return Choice(rung.codec, rung.keyframe, rung.direct, levels[k], bits, streak, why)


@dataclass(frozen=True)
class _View:
    """The sites of one decision, and the step that their rungs would make."""

    policy: HideBehindCompute
    sites: tuple[BoundarySite, ...]
    pace: float = 1.0  # of the measured rates

    @property
    def current(self) -> Levels:
        tops = (len(self.policy.ladder(s)) - 1 for s in self.sites)
        return tuple(min(s.rung or 0, top) for s, top in zip(self.sites, tops, strict=True))

    @property
    def floor(self) -> Levels:
        return tuple(c * self.is_held(s) for c, s in zip(self.current, self.sites, strict=True))

    @property
    def unknown(self) -> Levels:
        """The streaks where nothing is decided: -1 for as long as nothing was ever known of a site."""
        return tuple(-1 if s.rung is None else s.streak for s in self.sites)

    @property
    def finer(self) -> Levels:
        """The rungs that could be taken instead of those in use."""
        return self.risen(self.current) if self.fits(self.current) else self.current

    @property
    def is_timed(self) -> bool:
        """Whether the compute of every stage is known."""
        return bool(self.sites) and all(s.sender_s and s.receiver_s for s in self.sites)

    def slower(self, margin: float) -> _View:
        return replace(self, pace=self.pace * (1 - margin))

    def bits(self, k: int, level: int) -> float:
        """Return the bits a value a rung should take, by what the one in use really took."""
        site, ladder = self.sites[k], self.policy.ladder(self.sites[k])
        rung, used = ladder[level], ladder[self.current[k]]
        expected = rung.expected(site.fresh)
        if site.bits is None or site.rung is None or rung.direct or used.direct:
            return expected
        # What a code takes depends on what there is to say, what it takes more than another hardly: about
        # a bit for a bit of accuracy, and less where little is said.
        return max(LEAST, site.bits + expected - used.expected(site.fresh))

    def seconds(self, levels: Levels) -> float:
        """Return the seconds of a step with these rungs."""
        first = min(s.boundary for s in self.sites)
        last = max(s.boundary for s in self.sites)
        m = max(s.messages for s in self.sites)
        compute = {s.sender: s.sender_s or 0.0 for s in self.sites}
        compute |= {s.receiver: s.receiver_s or 0.0 for s in self.sites}
        hops = {(s.boundary, s.is_forward): self._hop(k, level) for k, (s, level) in self._with(levels)}
        stages = (compute.get(k, 0.0) / m for k in range(first, last + 2))
        return step_seconds(
            Pipeline(
                tuple(Stage(s * FORWARD_SHARE, s * (1 - FORWARD_SHARE)) for s in stages),
                tuple(hops.get((k, True), Hop()) for k in range(first, last + 1)),
                tuple(hops.get((k, False), Hop()) for k in range(first, last + 1)),
                m,
                self.policy.schedule,
            )
        )

    def _with(self, levels: Levels) -> Iterable[tuple[int, tuple[BoundarySite, int]]]:
        return enumerate(zip(self.sites, levels, strict=True))

    def _hop(self, k: int, level: int) -> Hop:
        site = self.sites[k]
        nbytes = site.values * self.bits(k, level) / 8 / site.messages
        # A slower line is one with more to carry: then the margin is one to TCP's window as well.
        return Hop.over(nbytes / self.pace, site.rate, (site.rtt or 0.0) / 2, site.restarts)

    @property
    def limit(self) -> float:
        directions = len({s.is_forward for s in self.sites})
        return self.seconds((0,) * len(self.sites)) * (1 + self.policy.tolerance * directions)

    def fits(self, levels: Levels) -> bool:
        return self.seconds(levels) <= self.limit

    def risen(self, start: Levels) -> Levels:
        """Return the rungs after all sites rose as far as fits: the lowest first, gradients before others."""
        levels, limit = list(start), self.limit
        rising = {k for k, s in enumerate(self.sites) if not self.is_held(s)}
        while rising:
            k = min(rising, key=lambda k: (levels[k], self.sites[k].is_forward))
            levels[k] += 1
            top = len(self.policy.ladder(self.sites[k])) - 1
            if levels[k] > top or not self._bears(tuple(levels), k, limit):
                levels[k] -= 1
                rising.remove(k)
        return tuple(levels)

    def _bears(self, levels: Levels, k: int, limit: float) -> bool:
        """Say whether the step bears these rungs: all of them together, and the one at site ``k``."""
        alone = self.seconds((*levels[:k], 0, *levels[k + 1 :])) * (1 + self.policy.tolerance)
        return self.seconds(levels) <= min(limit, alone)

    def is_held(self, site: BoundarySite) -> bool:
        return site.rate is None or (site.age or 0.0) > self.policy.max_age

    def reason(self, levels: Levels, k: int, streak: int) -> str:
        """Say in one clause why site ``k`` has the rung it has."""
        site, level = self.sites[k], levels[k]
        if not self.is_timed or self.is_held(site):
            return self._unknown(site)
        link, ladder = self._link(levels, k), self.policy.ladder(site)
        said = f"the floor of {self.bits(k, level):.1f} bits"
        if level:
            said = f"{self.bits(k, level):.1f} bits add {self._added(levels, k, level)} to the step"
        if ladder[level].direct and level:
            more = "compression" if level + 1 == len(ladder) else "more compression"
            return f"{link}: {more} would gain nothing, {said}"
        if level + 1 == len(ladder):
            return f"{link}: {said}"
        wait = f", fits {streak} of {self.policy.patience} times" if streak > 0 else ""
        finer = f"{self.bits(k, level + 1):.1f} bits would add {self._added(levels, k, level + 1)}"
        return f"{link}: {said}{'; ' if not level else ', '}{finer}{'' if level else ' to the step'}{wait}"

    def _unknown(self, site: BoundarySite) -> str:
        if not self.is_timed:
            what = "no step was timed yet"
        elif site.rate is None:
            what = "the link's rate is not known"
        else:
            what = f"the link was last measured {site.age:.0f} s ago"
        return f"{what}: {'the floor' if not site.rung else 'as before'}"

    def _link(self, levels: Levels, k: int) -> str:
        """Say what is known of the link, and whether it is TCP's window that makes a finer rung dear."""
        site = self.sites[k]
        said = f"{1e3 * (site.rtt or 0.0):.0f} ms and {site.rate * 1e-6:.2f} MB/s"  # type: ignore[operator]
        if not any(s.restarts for s in self.sites):
            return said
        finer = min(levels[k] + 1, len(self.policy.ladder(site)) - 1)
        steady = replace(self, sites=tuple(replace(s, restarts=False) for s in self.sites))
        shuts = self._longer(levels, k, finer) > 2 * steady._longer(levels, k, finer) + LITTLE
        return f"{said}, TCP restarts after pauses" if shuts else said

    def _longer(self, levels: Levels, k: int, level: int) -> float:
        """Return by what share rung ``level`` at site ``k`` makes the step longer than its floor would."""
        there, floor = ((*levels[:k], n, *levels[k + 1 :]) for n in (level, 0))
        return self.seconds(there) / self.seconds(floor) - 1

    def _added(self, levels: Levels, k: int, level: int) -> str:
        percent = max(0.0, 100 * self._longer(levels, k, level))  # more can keep a window open
        return f"{percent:.1f} %" if percent < 9.95 else f"{percent:.0f} %"
