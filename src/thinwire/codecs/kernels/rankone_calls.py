"""Calls of the kernels of ``RankOne``."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs.kernels import triton_calls
from thinwire.codecs.kernels.bits import packed_nbytes, plane_count
from thinwire.codecs.kernels.scales import matrices
from thinwire.types import TensorSpec

SIZE = 512  # values of a plane that a program works on
_TALL, _WIDE, _LAPS = 32, 128, 8  # of a matrix, of which a program adds up magnitudes


_FEW = 1 << 18  # values of a matrix, all of which are looked at for its largest magnitude


class Levels(NamedTuple):
    """The levels of positive codes, the edges between them, and bounds of scales."""

    bits: int
    edges: tuple[float, ...]
    levels: tuple[float, ...]
    row: tuple[float, float]
    column: tuple[float, float]


@lru_cache(maxsize=64)
def table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return values on a device, float32, without a copy to it."""
    made = torch.empty(len(values), dtype=torch.float32, device=device)
    for place, value in enumerate(values):
        made[place].fill_(value)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other threads use it, on streams of their own
    return made


def _sums(x: Tensor, held: Tensor, shape: tuple[int, int, int], against: bool) -> tuple[Tensor, Tensor]:
    """Return the flags, with the peaks of matrices, and the sums of their magnitudes."""
    from thinwire.codecs.kernels.fused import levelling

    count, rows, width = shape
    lead = -(-(1 + 2 * count) // 2)
    room = torch.zeros(lead + 2 * count * (1 + rows + width), dtype=torch.int64, device=x.device)
    flags, sums = room[:lead].view(torch.int32), room[lead:]
    per, size = rows * width, 2 * SIZE
    stride = 1 if per < _FEW else 16
    laps = min(_LAPS, -(-per // size))
    programs, how = (-(-per // (size * laps * stride)), count), (size, laps, stride, against)
    triton_calls.launch(levelling.peaks_of_matrices, programs, (x, held, flags), (per,), how)
    laps = min(_LAPS, -(-rows // _TALL))
    tiles = -(-rows // (_TALL * laps)), -(-width // _WIDE), count
    for again in (False, True)[: 1 if stride == 1 else 2]:
        tensors, tile = (x, held, flags, sums), (width, _TALL, _WIDE, laps, again, against)
        triton_calls.launch(levelling.sums_of_matrices, tiles, tensors, (count, rows), tile)
    return flags, sums


def coded(
    levels: Levels, x: Tensor, reference: Tensor | None, back: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor]:
    """Return codes and scales of ``x`` or of its difference to ``reference``, and what these stand for.

    The latter, float32 with a reference and as ``x`` without, if ``back``. Last, a flag, int32: not 0 where a
    value was not finite.
    """
    from thinwire.codecs.kernels.fused import levelling

    x, against = x.contiguous(), reference is not None
    held = x if reference is None else reference.contiguous()
    count, rows, width = shape = matrices(TensorSpec.of(x))
    flags, sums = _sums(x, held, shape, against)
    n, nbytes, scales = x.numel(), packed_nbytes(x.numel(), levels.bits), count * (rows + width)
    room = torch.empty(-(-nbytes // 16) * 16 + 2 * scales, dtype=torch.uint8, device=x.device)
    packed, stored = room[:nbytes], room[room.numel() - 2 * scales :].view(torch.bfloat16)
    bounds = (*levels.row, *levels.column)
    triton_calls.launch(
        levelling.scales_of_matrices,
        (-(-scales // 256),),
        (flags, sums, stored),
        (count, rows),
        (width, 256, *bounds),
    )
    restored = torch.empty_like(held) if back else x
    limit = 65504.0 if x.dtype == torch.float16 and not against else 0.0
    planes = plane_count(levels.bits)
    m = -(-n // planes)
    triton_calls.launch(
        levelling.levelled,
        (-(-m // SIZE),),
        (x, held, restored, packed, stored, table(levels.edges + levels.levels, x.device)),
        (n, m, count * rows, rows * width),
        (width, SIZE, levels.bits, planes, against, back, limit),
    )
    parts = packed, stored[: count * rows], stored[count * rows :]
    return parts, restored if back else None, flags[0]


def values(
    levels: Levels, parts: tuple[Tensor, ...], spec: TensorSpec, reference: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what codes and scales stand for, and flags: whether a row's, or a column's, is out of range.

    On top of a reference it is float32, else of ``spec``.
    """
    from thinwire.codecs.kernels.fused import levelling

    packed, row, column = parts
    against, device, (_, rows, width) = reference is not None, packed.device, matrices(spec)
    restored = torch.empty(spec.shape, dtype=torch.float32 if against else spec.dtype, device=device)
    held = restored if reference is None else reference.contiguous()
    flags = torch.zeros(2, dtype=torch.int32, device=device)
    limit = 65504.0 if spec.dtype == torch.float16 and not against else 0.0
    planes = plane_count(levels.bits)
    m = -(-spec.numel // planes)
    triton_calls.launch(
        levelling.scaled,
        (-(-m // SIZE),),
        (packed, row, column, held, restored, flags, table(levels.edges + levels.levels, device)),
        (spec.numel, m, rows * width),
        (width, SIZE, levels.bits, planes, *levels.row, *levels.column, against, limit),
    )
    return restored, flags
