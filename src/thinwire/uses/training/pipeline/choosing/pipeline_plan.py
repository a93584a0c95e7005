"""Plan a run before it: order of the machines, cut, schedule and recipe, by the step they should take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

from thinwire.types import InputError, require
from thinwire.uses.training.pipeline.choosing.hide import FORWARD_SHARE
from thinwire.uses.training.pipeline.choosing.pipeline_policy import BoundarySite, PipelinePolicy
from thinwire.uses.training.pipeline.choosing.replay import (
    Hop,
    Pipeline,
    Stage,
    step_seconds,
    uncrowded_seconds,
    without_links,
)

MAX_MACHINES = 4  # every order of more would take too long to try
WORTH = 0.04  # of the fastest step: what a more exact recipe may cost more
SETTLED = 1 << 30  # decisions for which all has been as it is: no policy is patient for longer
SAME = 0.01  # of the fastest step: what a schedule that needs less memory may cost more
Cut = tuple[int, ...]  # layers of each stage


@dataclass(frozen=True)
class StageMachine:
    """A machine by what the parts of the model take on it, in seconds of one micro-batch."""

    name: str
    layer: float  # forward and backward of one layer
    head: float = 0.0
    update: float = 0.0  # a layer's share of the optimiser step
    embed: float = 0.0  # forward and backward of the embedding
    head_update: float = 0.0
    embed_update: float = 0.0


@dataclass(frozen=True)
class Way:
    """One direction between two machines: bytes/s (``None``: no limit) and one-way seconds.

    ``restarts``: whether TCP begins there with a small window after each pause, as Linux's own control does.
    """

    rate: float | None = None
    delay: float = 0.0
    restarts: bool = True


@dataclass(frozen=True)
class Work:
    """What a step is made of: layers, micro-batches, and the values that one of these sends on."""

    layers: int
    microbatches: int
    values: int


@dataclass(frozen=True)
class Option:
    """A recipe by the bits a value it sends each way; its policy may then take finer ones.

    Of several recipes about as fast, the first in order is proposed: list the exact ones first.
    """

    name: str
    forward: float
    backward: float
    policy: PipelinePolicy | None = None


@dataclass(frozen=True)
class Leg:
    """One direction of a boundary in a proposal: its bits a value, and what its transfer adds to the step."""

    source: str
    target: str
    bits: float
    added: float  # a share of the step without this transfer


@dataclass(frozen=True)
class Proposal:
    """A way to run: machines in the order of the stages, and the step it should take."""

    recipe: str
    schedule: str
    order: tuple[str, ...]
    cut: Cut
    seconds: float
    unlimited_s: float  # the same with links that take no time
    uncrowded_s: float  # the same did no message wait for another on its line
    legs: tuple[Leg, ...] = field(repr=False, default=())


Ways = Mapping[tuple[str, str], Way]


def propose(
    machines: Sequence[StageMachine],
    ways: Ways,
    work: Work,
    options: Sequence[Option],
    schedules: Sequence[str] = ("1f1b", "eager1f1b", "gpipe"),
) -> list[Proposal]:
    """Return the best plan for each option, the proposed one first, the others by predicted step.

    Tries every order of the machines and every schedule; for each, the cut that evens the stages out and from
    there whatever single layers gain by moving. Of schedules about as fast the first named is taken: the one
    that needs least memory, though whether a stage fits is not looked at. Errors: ``InputError`` for a
    missing link, and for more machines than layers or than four.

    >>> ab = [StageMachine("a", 0.01), StageMachine("b", 0.03)]
    >>> link = {("a", "b"): Way(1e6, 0.01), ("b", "a"): Way(1e6, 0.01)}
    >>> propose(ab, link, Work(12, 8, 1000), [Option("fp32", 32, 32)])[0].cut
    (10, 2)
    """
    _check(machines, ways, work)
    found = [
        _first([_best(machines, ways, work, option, schedule) for schedule in schedules], SAME)
        for option in options
    ]
    return _ranked(found)


def foretell(
    machines: Sequence[StageMachine],
    ways: Ways,
    work: Work,
    options: Sequence[Option],
    cut: Cut,
    schedule: str,
) -> list[Proposal]:
    """Return the step of each option, the proposed one first: ``propose`` with order, cut and schedule given.

    >>> ab = [StageMachine("a", 0.01), StageMachine("b", 0.01)]
    >>> free = {("a", "b"): Way(), ("b", "a"): Way()}
    >>> foretell(ab, free, Work(12, 8, 1000), [Option("fp32", 32, 32)], (9, 3), "1f1b")[0].cut
    (9, 3)
    """
    _check(machines, ways, work)
    require(
        len(cut) == len(machines) and min(cut) > 0 and sum(cut) == work.layers,
        InputError,
        f"cut {','.join(map(str, cut))} does not fit {len(machines)} machines and {work.layers} layers",
    )
    return _ranked([_proposal(machines, ways, work, cut, option, schedule) for option in options])


def _ranked(found: Sequence[Proposal]) -> list[Proposal]:
    chosen = _first(found, WORTH)
    return [chosen, *sorted((p for p in found if p is not chosen), key=lambda p: p.seconds)]


def _first(proposals: Sequence[Proposal], worth: float) -> Proposal:
    """Return the first that takes at most ``worth`` of the fastest's seconds more."""
    fastest = min(p.seconds for p in proposals)
    return next(p for p in proposals if p.seconds <= fastest * (1 + worth))


def _check(machines: Sequence[StageMachine], ways: Ways, work: Work) -> None:
    n, names = len(machines), [m.name for m in machines]
    require(2 <= n <= MAX_MACHINES, InputError, f"{n} machines; a pipeline takes 2 to {MAX_MACHINES}")
    require(len(set(names)) == n, InputError, f"two machines of one name in {', '.join(names)}; rename one")
    require(
        n <= work.layers,
        InputError,
        f"{n} machines for {work.layers} layers; each needs one, so leave some out",
    )
    for pair in permutations(names, 2):
        require(pair in ways, InputError, f"no link from {pair[0]} to {pair[1]}; add it")


def _best(
    machines: Sequence[StageMachine], ways: Ways, work: Work, option: Option, schedule: str
) -> Proposal:
    def seconds(order: Sequence[StageMachine], cut: Cut) -> float:
        bits = [(option.forward, option.backward)] * (len(cut) - 1)
        return step_seconds(pipeline_of(order, ways, work, cut, bits, schedule))

    tried = []
    for order in permutations(machines):
        cut = _even(order, work)
        least = seconds(order, cut)
        while True:
            moved = min(((seconds(order, c), c) for c in _neighbours(cut)), default=(math.inf, cut))
            if moved[0] >= least * (1 - 1e-9):
                break
            least, cut = moved
        tried.append((least, order, cut))
    _, order, cut = min(tried, key=lambda t: t[0])
    return _proposal(order, ways, work, cut, option, schedule)


def _even(order: Sequence[StageMachine], work: Work) -> Cut:
    """Return the cut whose slowest stage is fastest: each layer in turn to the stage that it fills least."""
    cut = [1] * len(order)
    for _ in range(work.layers - len(order)):
        more = [n + 1 for n in cut]
        filled = [work.microbatches * (s.forward + s.backward) + s.update for s in _stages(order, more)]
        cut[filled.index(min(filled))] += 1
    return tuple(cut)


def _neighbours(cut: Cut) -> Iterator[Cut]:
    """Yield the cuts with one layer moved from a stage to another."""
    for a in range(len(cut)):
        for b in range(len(cut)):
            if a != b and cut[a] > 1:
                yield tuple(n - (k == a) + (k == b) for k, n in enumerate(cut))


def pipeline_of(
    order: Sequence[StageMachine],
    ways: Ways,
    work: Work,
    cut: Cut,
    bits: Sequence[tuple[float, float]],
    schedule: str,
) -> Pipeline:
    """Return the pipeline of these machines; ``bits`` a value forward and backward at each boundary."""

    def hop(a: StageMachine, b: StageMachine, width: float) -> Hop:
        way = ways[a.name, b.name]
        return Hop.over(work.values * width / 8, way.rate, way.delay, way.restarts)

    pairs = [(order[k], order[k + 1], *bits[k]) for k in range(len(order) - 1)]
    forward = tuple(hop(a, b, there) for a, b, there, _ in pairs)
    backward = tuple(hop(b, a, back) for a, b, _, back in pairs)
    return Pipeline(tuple(_stages(order, cut)), forward, backward, work.microbatches, schedule)


def _stages(order: Sequence[StageMachine], cut: Sequence[int]) -> Iterator[Stage]:
    for machine, layers in zip(order, cut, strict=True):
        first, last = machine is order[0], machine is order[-1]
        seconds = machine.layer * layers + machine.embed * first + machine.head * last
        update = machine.update * layers + machine.embed_update * first + machine.head_update * last
        yield Stage(seconds * FORWARD_SHARE, seconds * (1 - FORWARD_SHARE), update)


def _proposal(
    order: Sequence[StageMachine], ways: Ways, work: Work, cut: Cut, option: Option, schedule: str
) -> Proposal:
    bits = [(option.forward, option.backward)] * (len(order) - 1)
    if option.policy is not None:
        bits = _planned(order, ways, work, cut, option.policy, schedule)
    pipeline = pipeline_of(order, ways, work, cut, bits, schedule)
    return Proposal(
        option.name,
        schedule,
        tuple(m.name for m in order),
        cut,
        step_seconds(pipeline),
        step_seconds(without_links(pipeline)),
        uncrowded_seconds(pipeline),
        tuple(_legs(order, pipeline, bits)),
    )


def _planned(
    order: Sequence[StageMachine], ways: Ways, work: Work, cut: Cut, policy: PipelinePolicy, schedule: str
) -> list[tuple[float, float]]:
    """Return the bits that a policy settles on while all samples are first visits."""
    m = work.microbatches
    compute = [m * (s.forward + s.backward) for s in _stages(order, cut)]
    sites = []
    for k in range(len(order) - 1):
        for a, b in ((k, k + 1), (k + 1, k)):
            way = ways[order[a].name, order[b].name]
            known = way.rate or math.inf, 2 * way.delay, 0.0, compute[a], compute[b], way.restarts
            sites.append(BoundarySite(a, b, work.values * m, m, *known, fresh=1.0, rung=0, streak=SETTLED))
    chosen = policy.under(schedule).choose(sites)
    return [(there.bits, back.bits) for there, back in zip(chosen[::2], chosen[1::2], strict=True)]


def _legs(
    order: Sequence[StageMachine], pipeline: Pipeline, bits: Sequence[tuple[float, float]]
) -> Iterator[Leg]:
    whole = step_seconds(pipeline)
    for k, widths in enumerate(bits):
        for back, width in zip((False, True), widths, strict=True):
            hops = list(pipeline.backward if back else pipeline.forward)
            hops[k] = replace(hops[k], transfer=0.0)
            one_free = tuple(hops)
            free = replace(pipeline, backward=one_free) if back else replace(pipeline, forward=one_free)
            a, b = order[k + back].name, order[k + 1 - back].name
            yield Leg(a, b, width, whole / step_seconds(free) - 1)
