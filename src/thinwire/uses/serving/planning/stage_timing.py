"""What a machine takes for its part of a served model: some layers and the head, timed with random weights.

The weights are those of no model: nothing but the config is needed, and a model that no memory holds can be
planned. So many layers are timed that their weights do not stay in a processor's caches, as a whole stage's
would not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.files.host_memory import memory_bytes
from thinwire.runs.machine import devices
from thinwire.runs.machine.compute import Compute, computing_threads
from thinwire.runs.machine.processor import keep_freed, pick_threads
from thinwire.runs.models.cuts import counted_costs, median_seconds
from thinwire.runs.models.split import probe
from thinwire.seeding import seeded
from thinwire.uses.serving.choosing.ring_forecast import CodingCosts, PassCosts, TokenCurve
from thinwire.uses.serving.planning.machine_timing import RECIPES, MachineTiming
from thinwire.uses.serving.planning.plan_options import PlannedConfig
from thinwire.uses.serving.ring_messages import Portion
from thinwire.uses.serving.row_pool import TextRows, TextSegment
from thinwire.uses.serving.run.stage_program import with_cache
from thinwire.uses.serving.stage_work import PROMPT, Answers, StageWork
from thinwire.uses.serving.token_picking import Picking

SPILL = 192 << 20  # bytes of weights that no processor's caches hold
FEW, SEVERAL = (1, 4, 16), 4  # tokens of one text in a pass; texts in a pass
REST = 0.02  # seconds between passes, as a stage has while others work: then caches and clocks are not warm
SEEN = 2048  # rows that tokens see, at most: what they cost is linear in them


def measure(config: PlannedConfig, model: Any) -> MachineTiming:
    """Return what this machine takes for the layers, head and messages of ``model``, a config.

    On the device and threads, in the dtype, with prompts and chunks of ``config``. Medians; some ten seconds
    for a small model on two cores.
    """
    keep_freed()
    device = devices.own(config.device)
    compute = Compute.of(device, config.dtype)
    with computing_threads(pick_threads(config)), seeded():
        passes, cached = _passes(config, model, compute)
        return MachineTiming(
            model=config.model,
            dtype=str(compute.dtype).removeprefix("torch."),
            device=device.type,
            threads=config.threads,
            chunk=config.chunk,
            memory=free_memory(device) if config.memory is None else config.memory * 1e9,
            cached=cached,
            passes=passes,
            coding={name: _coding(config, model, name, compute) for name in RECIPES},
        )


def free_memory(device: torch.device) -> float:
    """Return the bytes that are free on a device, or in all where nobody says what is free."""
    if device.type == devices.CUDA:
        return float(torch.cuda.mem_get_info(device)[0])
    total, free = memory_bytes()
    return float(free or total or 0)


def _passes(config: PlannedConfig, model: Any, compute: Compute) -> tuple[PassCosts, float]:
    """Return the costs of passes, and the bytes of a token's keys and values in a layer.

    A layer's are the mean of all layers, by what each multiplies.
    """
    counted = counted_costs(model).layers
    each = sum(counted) / len(counted) * compute.dtype.itemsize
    many = min(len(counted), max(1, round(SPILL / each)))
    seen = min(config.prompt_tokens, SEEN)
    own = _with_rows(config, SEVERAL * (seen + max(config.chunk, *FEW)))
    timer = _PassTimer(
        with_cache(probe(model, range(len(counted) - many, len(counted)), last=True), own, compute.device),
        seen,
    )
    bare = _PassTimer(with_cache(probe(model, range(0), last=False), own, compute.device), seen)
    sizes = tuple(sorted({*FEW, config.chunk}))
    rest = {n: bare.seconds([n], compute) for n in sizes}
    timer.fill()
    scale = sum(counted) / len(counted) / (sum(counted[-many:]) / many) / many

    def layer(parts: Sequence[int], beside: float, at: int | None = None) -> float:
        return max(0.0, timer.seconds(parts, compute, at=at) - beside) * scale

    late = {n: layer([n], rest[n]) for n in sizes}
    early = layer([config.chunk], rest[config.chunk], at=0)
    pair = max(0.0, late[config.chunk] - early) / (config.chunk * seen)
    base = {n: late[n] - pair * n * (seen + n) for n in sizes}
    together = layer([1] * SEVERAL, rest[SEVERAL])
    rows = SEVERAL * (seen + 1)
    row = max(0.0, together - base[SEVERAL] - pair * SEVERAL * rows) / rows
    head = [timer.head_seconds(n, compute) for n in FEW]
    layers = TokenCurve(sizes, tuple(max(0.0, base[n]) for n in sizes))
    passes = PassCosts(
        layers, TokenCurve(sizes, tuple(rest.values())), TokenCurve(FEW, tuple(head)), pair, row
    )
    return passes, timer.cached / many


def _with_rows(config: PlannedConfig, rows: int, **more: Any) -> PlannedConfig:
    """Return options of a stage with so many rows, whatever texts are planned."""
    return config.replace(cache=max(16, rows), at_once=1, prompt_tokens=1, tokens=2, machine=(), **more)


class _PassTimer:
    """Passes through one probe, of texts that have ``seen`` tokens before."""

    def __init__(self, work: StageWork, seen: int) -> None:
        self._work, self._seen = work, seen
        self._with_head = work.stage.last
        self._rows = work.cache.many // SEVERAL

    @property
    def cached(self) -> float:
        """Bytes of a token's keys and values in all layers."""
        return self._work.cache.nbytes / self._work.cache.many

    def _portions(self, parts: Sequence[int], at: int, wanted: int) -> list[Portion]:
        rows = [TextRows(k * self._rows, self._rows) for k in range(len(parts))]
        return [
            Portion(TextSegment(k, own, at, many), wanted, (0,) * (wanted - 1))
            for k, (own, many) in enumerate(zip(rows, parts, strict=True))
        ]

    def fill(self) -> None:
        """Give all texts keys and values: rows that nobody wrote are no memory yet."""
        for k in range(SEVERAL):
            segment = TextSegment(k, TextRows(k * self._rows, self._rows), 0, self._seen)
            self._pass([Portion(segment)], last=False)

    def seconds(self, parts: Sequence[int], compute: Compute, at: int | None = None) -> float:
        """Time a pass of so many tokens of each text, without the head."""
        portions = self._portions(parts, self._seen if at is None else at, 0)
        return median_seconds(lambda: self._pass(portions, last=False), compute, REST)

    def head_seconds(self, wanted: int, compute: Compute) -> float:
        """Time what the head adds to a pass, tokens picked."""
        portions = self._portions([wanted], self._seen, wanted)
        both = median_seconds(lambda: self._pass(portions, last=True), compute, REST)
        return max(0.0, both - median_seconds(lambda: self._pass(portions, last=False), compute, REST))

    def _pass(self, portions: list[Portion], last: bool) -> None:
        self._work.stage.last = last and self._with_head
        found = self._work.extend(portions, self._hidden(sum(p.segment.many for p in portions)))
        if last:
            Answers(self._work, {0: Picking(1.0)}).of(portions, found)

    def _hidden(self, tokens: int) -> Tensor:
        return torch.randn(1, tokens, self._work.width, device=self._work.device).to(self._work.dtype)


def _coding(config: PlannedConfig, model: Any, recipe: str, compute: Compute) -> CodingCosts:
    """Return what messages of a recipe cost: those of tokens, and those of prompts, which are longer."""
    own = _with_rows(config, max(config.chunk, PROMPT), recipe=recipe)
    work = with_cache(probe(model, range(0), last=False), own, compute.device)
    sizes = tuple(sorted({1, min(PROMPT - 1, config.chunk), PROMPT, config.chunk}))
    found = [_coded(work, n, compute) for n in sizes]
    nbytes, encode, decode = (TokenCurve(sizes, values) for values in zip(*found, strict=True))
    return CodingCosts(nbytes, encode, decode)


def _coded(work: StageWork, tokens: int, compute: Compute) -> tuple[float, float, float]:
    """Return bytes, and seconds to code and to decode the hidden states of so many tokens."""
    portion = Portion(TextSegment(0, TextRows(0, tokens), 0, tokens))
    hidden = torch.randn(1, tokens, work.width, device=work.device).to(work.dtype)
    (sent,) = work.code([portion], hidden)
    timed: list[Callable[[], object]] = [lambda: work.code([portion], hidden), lambda: work.decode([sent])]
    encode, decode = (median_seconds(each, compute) for each in timed)
    return float(len(sent.packet)), encode, decode
