"""Where to cut a model into stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.lab.families import family_of, meta_model
from thinwire.types import InputError, require


@dataclass(frozen=True)
class LayerCosts:
    """Cost of each layer, and of the head on the last stage; any one unit. The embedding look-up is free."""

    layers: tuple[float, ...]
    head: float = 0.0


def counted_costs(config: Any) -> LayerCosts:
    """Return multiplications a token: the parameters of each layer and of the head."""
    family = family_of(config)
    model = meta_model(config)
    layers = getattr(getattr(model, family.base), family.layers)
    return LayerCosts(tuple(float(_numel(layer)) for layer in layers), float(_numel(model.lm_head)))


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def measured_costs(config: Any, batch: int, seq: int, repeats: int = 3) -> LayerCosts:
    """Time forward and backward of one layer and of the head on this machine, in seconds.

    Two ranks measure two different things: measure on one, and send the cut to the others.
    """
    from thinwire.lab.split import probe

    x = torch.randn(batch, seq, config.hidden_size)
    layer, head = probe(config, range(1), last=False), probe(config, range(0), last=True)
    per_layer = _time(layer, x, repeats)
    return LayerCosts((per_layer,) * config.num_hidden_layers, _time(head, x, repeats))


def _time(stage: Callable[[Tensor], Tensor], x: Tensor, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats + 1):  # the first one warms up
        start = time.perf_counter()
        stage(x.clone().requires_grad_()).float().sum().backward()
        best = min(best, time.perf_counter() - start)
    return best


def cut_layers(costs: LayerCosts, stages: int, cuts: str | None = None) -> list[range]:
    """Return the layers of each stage, at least one each, so that the costliest stage is as cheap as can be.

    ``cuts`` gives the numbers of layers instead: ``"19,11"``. ``InputError`` if they do not fit.

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
    sizes = _balanced(costs, stages) if cuts is None else _explicit(cuts, n, stages)
    starts = [sum(sizes[:k]) for k in range(stages)]
    return [range(s, s + size) for s, size in zip(starts, sizes, strict=True)]


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


def _balanced(costs: LayerCosts, stages: int) -> list[int]:
    """Minimise the largest stage by dynamic programming over (first layer, stages left)."""
    n = len(costs.layers)
    before = [0.0]
    for cost in costs.layers:
        before.append(before[-1] + cost)

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return before[n] - before[start] + costs.head, (n - start,)
        options: list[tuple[float, tuple[int, ...]]] = []
        for stop in range(start + 1, n - left + 2):
            rest, sizes = best(stop, left - 1)
            options.append((max(before[stop] - before[start], rest), (stop - start, *sizes)))
        return min(options, key=lambda o: o[0])

    return list(best(0, stages)[1])


def stage_costs(costs: LayerCosts, cut: Sequence[range]) -> list[float]:
    """Return the cost of each stage of a cut, the head's with the last.

    >>> stage_costs(LayerCosts((1.0, 1.0, 1.0), head=2.0), [range(0, 2), range(2, 3)])
    [2.0, 3.0]
    """
    totals = [sum(costs.layers[i] for i in part) for part in cut]
    totals[-1] += costs.head
    return totals
