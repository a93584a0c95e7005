"""What the hidden states of a video say of each other: from step to step, and from frame to frame.

``python -m bench.video.over_time``: wan-fashion makes clips on one machine. What its third block takes in
each step is coded as it would be for the next rank, each step against what the other end then has. A
residual is of the same token a step before (``step``), or of the token a frame before, in what the last step
does not tell (``step, then frame``), or the former's sums and differences of neighbouring frames are coded
(``step, frames mixed``). Nothing is sent: whether a frame helps is asked before a way is built for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.study.cells import Kept, makers, run_study
from bench.study.tables import Draw, columns
from thinwire.codecs import Codec, RankOne, Uniform, roundtrip
from thinwire.uses.pictures.run.video.clips import PATCH, Clip, sample_clip
from thinwire.uses.pictures.run.video.wan_fashion import load

KEPT = Kept("over_time")
CLIP, STEPS, BLOCK = Clip(16, 64, 64), 28, 2
SEEDS = range(2)
CODECS: dict[int, Codec] = {bits: RankOne(bits) for bits in (4, 3, 2)}
FIRST = Uniform(8, group=64)
STEP, CHAIN, MIXED = "step", "step, then frame", "step, frames mixed"
WAYS = (STEP, CHAIN, MIXED)
LEVELS = 3  # of sums and differences: 8 frames of tokens
DECAY = 0.75  # of how values moved before, at order 2
Row = dict[str, Any]


class Cell(NamedTuple):
    order: int
    bits: int
    seed: int


def cells() -> Iterator[Cell]:
    """Yield all cells."""
    yield from (Cell(order, bits, seed) for seed in SEEDS for order in (1, 2) for bits in CODECS)


def hidden_states(seed: int) -> Tensor:
    """Return what a block takes in each step [steps, frames, tokens of a frame, channels]."""
    model: Any = load()
    found, block = list[Tensor](), model.blocks[BLOCK]
    hook = block.register_forward_pre_hook(lambda m, args: found.append(args[0].detach()))
    sample_clip(model, CLIP, STEPS, seed)
    hook.remove()
    return torch.cat(found).unflatten(1, (CLIP.frames // PATCH[0], -1))


def measure(cell: Cell) -> Row:
    """Code a clip in each way; return decibels of the signal to the error, the mean of all steps."""
    states = hidden_states(cell.seed)
    return {way: decibels(states, way, CODECS[cell.bits], cell.order) for way in WAYS}


def decibels(states: Tensor, way: str, codec: Codec, order: int) -> float:
    """Return 10 log10 of signal to error, the mean over the steps behind the first."""
    known, before, found = roundtrip(FIRST, states[0])[1], None, list[Tensor]()
    for x in states[1:]:
        foretold = known if order == 1 or before is None else known + DECAY * (known - before)
        before, known = known, foretold + coded(x - foretold, way, codec)
        found.append(x.square().mean() / (known - x).square().mean())
    return float(10 * torch.stack(found).log10().mean())


def coded(residual: Tensor, way: str, codec: Codec) -> Tensor:
    """Return what the other end has of a residual [frames, tokens, channels]."""
    if way == STEP:
        return each(residual, codec)
    if way == MIXED:
        return unmixed([each(part, codec) for part in mixed(residual)])
    found, last = list[Tensor](), torch.zeros_like(residual[0])
    for frame in residual:
        last = last + each((frame - last)[None], codec)[0]
        found.append(last)
    return torch.stack(found)


def each(frames: Tensor, codec: Codec) -> Tensor:
    """Return each frame, coded by itself."""
    return torch.cat([roundtrip(codec, frame[None])[1] for frame in frames])


def mixed(frames: Tensor) -> list[Tensor]:
    """Return half the sums and differences of neighbours, and of the sums again: a Haar transform.

    >>> [x.flatten().tolist() for x in mixed(torch.arange(8.0)[:, None])]
    [[3.5], [-2.0], [-1.0, -1.0], [-0.5, -0.5, -0.5, -0.5]]
    """
    found = list[Tensor]()
    for _ in range(LEVELS):
        a, b = frames[0::2], frames[1::2]
        found.insert(0, (a - b) / 2)
        frames = (a + b) / 2
    return [frames, *found]


def unmixed(parts: Sequence[Tensor]) -> Tensor:
    """Return what ``mixed`` was given.

    >>> unmixed(mixed(torch.arange(8.0)[:, None])).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    frames = parts[0]
    for difference in parts[1:]:
        frames = torch.stack((frames + difference, frames - difference), 1).flatten(0, 1)
    return frames


def summary() -> Row:
    """Return the means over clips, by order and bits."""
    rows, cells_ = [], list[Row]()
    for order in (1, 2):
        for bits in CODECS:
            found = [kept for seed in SEEDS if (kept := KEPT.get(Cell(order, bits, seed)))]
            if found:
                means = {way: sum(f[way] for f in found) / len(found) for way in WAYS}
                rows.append({"order": order, "bits": bits, "db": means})
                cells_ += found
    return {"rows": rows, "made_by": makers(cells_)}


over_time = columns(
    "rows",
    ("order", "{order}"),
    ("bits", "{bits}"),
    *((way, lambda r, way=way: f"{r['db'][way]:.1f} dB") for way in WAYS),
)
TABLES: dict[str, Draw] = {"over_time": over_time}

if __name__ == "__main__":
    run_study("over_time", sys.argv[1:], cells, measure, summary)
