"""How much each member does in a round, so that all are done at about the same time: ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from thinwire.choosing.difference_codes import (
    DENSE_COSTS,
    FACTOR_COSTS,
    Sides,
    dense_bits,
    factor_bits,
)
from thinwire.codecs import Codec, DeadZone, Entropy, Factors, Uniform
from thinwire.codecs.deadzone import step_for
from thinwire.rounds.client_profile import Assignment, ClientPace, ClientProfile, Situation
from thinwire.spec import Spec
from thinwire.types import InputError, require

MOST_STEPS = 50  # local steps; what more cost training was not measured
# Models of fewer values go at 8 bits, which cost them nothing: steps of AdamW that are all of one size, as
# small models take them, are all zero under a dead zone.
SMALL, PLAIN, PLAIN_BITS = 1 << 17, Uniform(8, group=64), 8.5
GUESS = 2.5e6  # bytes/s: what a link that was not measured is taken for
EVEN = 1.25  # by this factor members may differ in when they are done
FINER, STRETCH = 1.03, 5.0  # factors by which the time of a round is tried, and by which it may grow in all
PATIENCE = 4.0  # times a full turn of the median member: who cannot be done by then is not waited for
HALVINGS = 20  # of the time in which steps are done together: a millionth
LEAST, SLACK, TRIPS = 5.0, 1.5, 4  # of a deadline: seconds, times the slowest turn, and round trips


@dataclass(frozen=True)
class _Way:
    """A code, the bytes of an update by it, and how many times the steps training needs by it."""

    codec: Codec
    nbytes: float
    cost: float


@dataclass(frozen=True, repr=False)
class Together(Spec):
    """Choose one time for a round, and for each member as many local steps and bytes as fit into it.

    It is the time in which the median member takes ``steps`` local steps and exchanges, longer where another
    member needs it for its first step, or where whole steps would leave members waiting for each other. A
    member takes 1 to 50 steps. Of all codes it has the one by which its round is worth most: steps, less
    what the code costs training. ``sides`` and ``loose``: of the model's matrices, as of ``Sides``; without
    any, no factors are sent. ``down_bits``: of a value of the version that all fetch, as ``step_for`` has it.
    ``together``: steps that all are to do together, as those behind a branch: then a round is the time in
    which these are done. A branch takes so many steps for each member behind it.

    >>> members = [ClientProfile(i, s, 1, up, up) for i, s, up in ((0, 0.05, 125e6), (1, 1.0, 2.5e6))]
    >>> for found in Together().assign(members, Situation(values=4_470_272)):
    ...     print(found.why)
    50 steps and 603 kB are done after 2.5 s of 5.5 s
    5 steps and 603 kB are done after 5.5 s of 5.5 s
    """

    steps: int = 10
    sides: int = 0
    loose: int = 0
    down_bits: float = 1.2
    together: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        few = 1 <= self.steps <= MOST_STEPS
        require(few, InputError, f"steps={self.steps} is not from 1 to {MOST_STEPS}; 10 are usual")
        for name in ("sides", "loose", "down_bits", "together"):
            value = getattr(self, name)
            require(value >= 0, InputError, f"{name}={value} is below 0; give 0 or more")

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> Sequence[Assignment]:
        """Return steps and codec for each member, in order."""
        members, ways = [_guessed(d) for d in devices], self._ways(situation.values)
        down = self._down(situation.values)
        if self.together:
            seconds = _time_for(self.together, members, ways, down)
        else:
            seconds = self._round(members, ways, down)
        found = [_best(m, ways, down, seconds) for m in members]
        if self.together:
            found = _fewer(found, sum(steps for steps, _ in found) - self.together)
        return [_explained(m, *each, down, seconds) for m, each in zip(members, found, strict=True)]

    def pace(self, devices: Sequence[ClientProfile], values: int) -> ClientPace:
        """Return how fast members are together who are all busy until the slowest has taken a step."""
        members, ways, down = [_guessed(d) for d in devices], self._ways(values), self._down(values)
        limit = self._limit(members, ways, down)
        first = max((t for m in members if (t := _least(m, ways, down)) <= limit), default=1.0)
        once, twice = (sum(_best(m, ways, down, t)[0] for m in members) or 1 for t in (first, 2 * first))
        each = first / ((twice - once) or once)
        many = max(1, sum(m.members for m in members))
        return ClientPace(each, max(0.0, first - once * each), many, once)

    def _ways(self, values: int) -> list[_Way]:
        """Return the codes to choose from, those that cost training least first."""
        if values < SMALL:
            return [_Way(PLAIN, values * PLAIN_BITS / 8, 1.0)]
        found = [
            _Way(Entropy(DeadZone(step_for(bits))), values * dense_bits(bits) / 8, cost)
            for bits, cost in DENSE_COSTS.items()
        ]
        if self.sides:
            seen = Sides(self.sides, self.loose)
            found += [
                _Way(Entropy(Factors(rank)), factor_bits(rank, seen) / 8, cost)
                for rank, cost in FACTOR_COSTS.items()
            ]
        return sorted(found, key=lambda way: (way.cost, way.nbytes))

    def download(self, values: int) -> Codec:
        """Return the codec of what all members share, as versions move it."""
        return PLAIN if values < SMALL else Entropy(DeadZone(step_for(self.down_bits)))

    def _down(self, values: int) -> float:
        return values * (PLAIN_BITS if values < SMALL else dense_bits(self.down_bits)) / 8

    def _limit(self, members: Sequence[ClientProfile], ways: Sequence[_Way], down: float) -> float:
        full = [self._usual(m, ways, down, MOST_STEPS * m.members) for m in members]
        return PATIENCE * median(full) if full else 0.0

    def _usual(self, member: ClientProfile, ways: Sequence[_Way], down: float, steps: int) -> float:
        """Return how long a turn of ``steps`` takes by the code that comes soonest to a loss."""
        turns = [(member.seconds(steps, way.nbytes, down), way.cost) for way in ways]
        return min(turns, key=lambda turn: turn[0] * turn[1])[0]

    def _round(self, members: Sequence[ClientProfile], ways: Sequence[_Way], down: float) -> float:
        """Return the shortest time in which members who are not bound are done within a quarter."""
        limit = self._limit(members, ways, down)
        waited = [m for m in members if _least(m, ways, down) <= limit]
        if not waited:
            return 0.0
        first = median(self._usual(m, ways, down, self.steps * m.members) for m in members)
        first = max(first, *(_least(m, ways, down) for m in waited))
        return next((t for t in _longer(first) if _is_even(waited, ways, down, t)), STRETCH * first)


def deadline(
    devices: Sequence[ClientProfile],
    assignments: Sequence[Assignment],
    values: int,
    policy: Together | None = None,
) -> float:
    """Return how many seconds a round may last in which these members do this.

    Half as long again as the slowest turn that is waited for, and some round trips; 5 s at least. ``policy``:
    the one that made the assignments, which knows what its codes take; another code is taken for raw values.
    """
    policy = policy or Together()
    members, ways, down = [_guessed(d) for d in devices], policy._ways(values), policy._down(values)
    limit, sizes = policy._limit(members, ways, down), {way.codec: way.nbytes for way in ways}

    def turn(m: ClientProfile, a: Assignment) -> float:
        return SLACK * m.seconds(a.steps, sizes.get(a.codec, 4.0 * values), down) + TRIPS * 2 * m.delay

    each = zip(members, assignments, strict=True)
    return max([LEAST, *(turn(m, a) for m, a in each if _least(m, ways, down) <= limit)])


def _guessed(device: ClientProfile) -> ClientProfile:
    """Return a device with a guess of what was not measured, and no more steps at least than it may take."""
    up, down = (GUESS if math.isinf(rate) else rate for rate in (device.up, device.down))
    return replace(device, up=up, down=down, least=min(device.least, MOST_STEPS * device.members))


def _longer(first: float) -> Iterator[float]:
    """Yield times of a round, from the first on."""
    many = int(math.log(STRETCH) / math.log(FINER))
    return (first * FINER**k for k in range(many + 1))


def _time_for(together: int, members: Sequence[ClientProfile], ways: Sequence[_Way], down: float) -> float:
    """Return the time in which members do so many steps together, or as many as they may."""
    full = [m.seconds(MOST_STEPS * m.members, max(way.nbytes for way in ways), down) for m in members]
    low, high = 0.0, max(full, default=0.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = sum(_best(m, ways, down, middle)[0] for m in members) >= together
        low, high = (low, middle) if enough else (middle, high)
    return high


def _fewer(found: list[tuple[int, _Way]], over: int) -> list[tuple[int, _Way]]:
    """Return so many steps less in all, one each in turn of those with more than one."""
    while over > 0 and any(steps > 1 for steps, _ in found):
        for i, (steps, way) in enumerate(found):
            less = int(over > 0 and steps > 1)
            found[i], over = (steps - less, way), over - less
    return found


def _least(member: ClientProfile, ways: Sequence[_Way], down: float) -> float:
    """Return how long a member's shortest turn takes."""
    return min(member.seconds(member.least, way.nbytes, down) for way in ways)


def _best(member: ClientProfile, ways: Sequence[_Way], down: float, seconds: float) -> tuple[int, _Way]:
    """Return the steps and the code by which ``seconds`` of a member are worth most."""
    found = [((seconds - member.seconds(0, way.nbytes, down)) / member.step_seconds, way) for way in ways]
    able = [
        (min(steps, MOST_STEPS * member.members), way) for steps, way in found if steps >= member.least - 1e-9
    ]
    if not able:
        return member.least, min(ways, key=lambda way: way.nbytes)
    steps, way = max(able, key=lambda each: (each[0] / each[1].cost, -each[1].nbytes))
    return max(1, int(steps + 1e-9)), way


def _is_even(members: Sequence[ClientProfile], ways: Sequence[_Way], down: float, seconds: float) -> bool:
    """Say whether those members are done at about the same time whom the most steps do not bind."""
    turns = []
    for m in members:
        steps, way = _best(m, ways, down, seconds)
        if steps < MOST_STEPS * m.members:
            turns.append(m.seconds(steps, way.nbytes, down))
    return not turns or max(turns) <= EVEN * min(turns)


def _explained(member: ClientProfile, steps: int, way: _Way, down: float, seconds: float) -> Assignment:
    done, plural = member.seconds(steps, way.nbytes, down), "s" if steps > 1 else ""
    size = f"{way.nbytes / 1e3:.0f} kB" if way.nbytes < 1e6 else f"{way.nbytes / 1e6:.1f} MB"
    late = ", too slow to be waited for" if done > seconds * (1 + 1e-6) else ""
    why = f"{steps} step{plural} and {size} are done after {done:.1f} s of {seconds:.1f} s{late}"
    return Assignment(steps, way.codec, why)
