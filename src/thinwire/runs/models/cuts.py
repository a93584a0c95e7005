"""Where to cut a model into stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations, pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.runs.data.task import next_token_loss
from thinwire.runs.machine.compute import ON_CPU, Compute
from thinwire.runs.models.families import family_of, meta_model
from thinwire.runs.models.lora import add_adapters
from thinwire.runs.models.split import probe
from thinwire.runs.models.stage import ModelStage
from thinwire.seeding import seeded
from thinwire.types import InputError, require

LEAST, SPAN = 3, 0.5  # times, and seconds: how often a piece of work is timed


@dataclass(frozen=True)
class LayerCosts:
    """Cost of each layer, and of the head on the last stage; any one unit. The embedding look-up is free."""

    layers: tuple[float, ...]
    head: float = 0.0


def counted_costs(config: Any) -> LayerCosts:
    """Return multiplications a token: the parameters it meets of each layer and of the head."""
    family, model = family_of(config), meta_model(config)
    head = sum(_numel(getattr(model, name)) for name in family.heads(model))
    few = getattr(config, "num_experts_per_tok", None) or 1

    def met(layer: nn.Module) -> float:  # of experts, stacked as [E, out, in], a token meets a few
        return sum(p.numel() * (few / len(p) if p.dim() == 3 else 1.0) for p in layer.parameters())

    return LayerCosts(tuple(met(layer) for layer in family.layers_of(model)), float(head))


def embedding_numel(config: Any) -> int:
    """Return the parameters of the embedding, that of positions included."""
    family = family_of(config)
    return sum(map(_numel, family.parts(family.base_of(meta_model(config)), family.before).values()))


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def measured_costs(
    config: Any,
    batch: int,
    seq: int,
    *,
    lora: int = 0,
    compute: Compute = ON_CPU,
    working: Callable[[], None] = lambda: None,
) -> LayerCosts:
    """Time forward and backward of each kind of layer and of the head on this machine, in seconds.

    For a micro-batch [``batch``, ``seq``], as it will be trained: with adapters of rank ``lora``, on the
    device and in the dtype of ``compute``. Two ranks measure two different things: measure on each, and agree
    on one cut. ``working`` is called after each piece, which others may be waiting behind.
    """

    def seconds(layers: range, last: bool) -> float:
        stage = probe(config, layers, last).requires_grad_(not lora)
        if lora and layers:
            add_adapters(stage, lora, seed=0)
        found = _time(stage, torch.randn(batch, seq, config.hidden_size), compute)
        working()
        return found

    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    layers = list(zip(kinds, counted_costs(config).layers, strict=True))
    first = {kind: layers.index(kind) for kind in layers}
    with seeded():
        each = {kind: seconds(range(i, i + 1), last=False) for kind, i in first.items()}
        return LayerCosts(tuple(each[kind] for kind in layers), seconds(range(0), last=True))


def embedding_seconds(config: Any, batch: int, seq: int, compute: Compute = ON_CPU) -> float:
    """Time forward and backward of the trained embedding: its gradient is as large as its whole matrix."""
    with seeded():
        ids = torch.randint(config.vocab_size, (batch, seq))
        return _time(probe(config, range(0), last=False, first=True), ids, compute)


def _time(stage: ModelStage, x: Tensor, compute: Compute) -> float:
    stage, x = stage.to(compute.device), x.to(compute.device)
    target = torch.zeros(x.shape[:2], dtype=torch.int64, device=compute.device)

    def both() -> None:
        with compute.autocast():
            y = stage(x.clone().requires_grad_(x.is_floating_point()))
        (next_token_loss(y, target) if stage.last else y.sum()).backward()

    return median_seconds(both, compute)


def median_seconds(work: Callable[[], object], compute: Compute = ON_CPU, rest: float = 0.0) -> float:
    """Return what ``work`` takes, repeated for ``SPAN``: the median, since a run is no best case either.

    ``rest``: seconds of sleep before each time, where a run has pauses, after which work takes longer.
    """
    work()  # warms up
    compute.wait()
    found: list[float] = []
    while len(found) < LEAST or sum(found) + rest * len(found) < SPAN:
        time.sleep(rest)
        start = time.perf_counter()
        work()
        compute.wait()
        found.append(time.perf_counter() - start)
    return median(found)


def cut_layers(
    costs: LayerCosts, stages: int, cuts: str | None = None, ranks: int | None = None
) -> list[range]:
    """Return the layers of each stage, at least one each, so that the costliest rank is as cheap as can be.

    ModelStage k is on rank k modulo ``ranks`` (default: a rank a stage). ``cuts`` gives the numbers of layers
    instead: ``"19,11"``. ``InputError`` if they do not fit.

    >>> cut_layers(LayerCosts((1.0,) * 30, head=8.0), 2)
    [range(0, 19), range(19, 30)]
    """
    n = len(costs.layers)
    require(stages >= 1, InputError, f"{stages} stages make no pipeline; use 1 or more")
    require(
        stages <= n,
        InputError,
        f"{stages} stages need {stages} layers or more, the model has {n}; use fewer stages",
    )
    return cut_for([costs] * stages, ranks) if cuts is None else ranges(_explicit(cuts, n, stages))


def _explicit(cuts: str, n: int, stages: int) -> list[int]:
    try:
        sizes = [int(part) for part in cuts.split(",")]
    except ValueError as e:
        raise InputError(f"cut {cuts!r} is not a list of layer counts; write it like 19,11") from e
    require(
        len(sizes) == stages and min(sizes) >= 1 and sum(sizes) == n,
        InputError,
        f"cut {cuts!r} does not fit: {len(sizes)} parts with {sum(sizes)} layers, "
        f"but {stages} stages share {n} layers, at least one each",
    )
    return sizes


def cut_for(machines: Sequence[LayerCosts], ranks: int | None = None) -> list[range]:
    """Return the layers of each stage where stage k runs on a machine with the costs ``machines[k]``.

    The slowest rank, with all the stages it carries, is as fast as can be; every stage has a layer at least.

    >>> slow, fast = LayerCosts((3.0,) * 8), LayerCosts((1.0,) * 8)
    >>> cut_for([slow, fast])
    [range(0, 2), range(2, 8)]
    """
    shared = ranks is not None and ranks < len(machines)
    return ranges(_interleaved(machines, ranks) if shared and ranks else _balanced(machines))


def ranges(sizes: Sequence[int]) -> list[range]:
    """Return consecutive ranges of these lengths from 0 on."""
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [range(s, s + size) for s, size in zip(starts, sizes, strict=True)]


def _balanced(machines: Sequence[LayerCosts]) -> list[int]:
    """Minimise the largest stage by dynamic programming over (first layer, stage); where it decides nothing,
    as when the head alone is the largest, the sum of squares, so that the others are even."""
    n, last = len(machines[0].layers), len(machines) - 1
    before = [list(accumulate(costs.layers, initial=0.0)) for costs in machines]

    @cache
    def best(start: int, stage: int) -> tuple[float, float, tuple[int, ...]]:
        own = before[stage]
        if stage == last:
            cost = own[n] - own[start] + machines[stage].head
            return cost, cost**2, (n - start,)
        options: list[tuple[float, float, tuple[int, ...]]] = []
        for stop in range(start + 1, n - (last - stage) + 1):
            cost = own[stop] - own[start]
            largest, squares, sizes = best(stop, stage + 1)
            options.append((max(cost, largest), cost**2 + squares, (stop - start, *sizes)))
        return min(options, key=lambda o: o[:2])

    return list(best(0, 0)[2])


def _interleaved(machines: Sequence[LayerCosts], ranks: int) -> list[int]:
    """Minimise the largest rank's sum over its stages, by trying every cut; then, as above, the squares."""
    n, stages = len(machines[0].layers), len(machines)
    before = [list(accumulate(costs.layers, initial=0.0)) for costs in machines]
    heads = [0.0] * (stages - 1) + [machines[-1].head]
    scale = before[0][n] or 1.0

    def cost(stops: Sequence[int]) -> tuple[float, float]:
        each = [own[b] - own[a] + h for own, a, b, h in zip(before, stops, stops[1:], heads, strict=False)]
        largest = max(sum(each[rank::ranks]) for rank in range(ranks))
        return round(largest / scale, 9), sum(c**2 for c in each)  # sums that differ by rounding are equal

    best = min(((0, *inner, n) for inner in combinations(range(1, n), stages - 1)), key=cost)
    return [b - a for a, b in pairwise(best)]


def stage_costs(costs: LayerCosts, cut: Sequence[range]) -> list[float]:
    """Return the cost of each stage of a cut on equal machines, the head's with the last.

    >>> stage_costs(LayerCosts((1.0, 1.0, 1.0), head=2.0), [range(0, 2), range(2, 3)])
    [2.0, 3.0]
    """
    totals = [sum(costs.layers[i] for i in part) for part in cut]
    totals[-1] += costs.head
    return totals
