"""Calls of the kernels of ``TileAdaptive``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs.kernels import scales, triton_calls
from thinwire.codecs.kernels.bits import packed_nbytes, plane_count
from thinwire.codecs.kernels.scales import Grid
from thinwire.types import TensorSpec

_SIZE = 1024
_VALUES = 1024  # that a program works on, in tiles
_SCALE = "bfloat16"


class Tiling(NamedTuple):
    """How a tensor is cut into tiles, and coded: see ``TileAdaptive``."""

    grid: Grid
    samples: int
    lows: int  # tiles of few bits, of all samples
    high: int
    low: int
    threshold: float
    pivot_bits: int

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Width of a tile, the same as a power of two, the last dimension, tiles in it, and of a program."""
        width = self.grid.width
        in_row = max(1, self.grid.padded // width)
        return width, width.bit_length() - 1, self.grid.last, in_row, max(1, _VALUES // width)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Return ``bits.pack`` of codes, uint8."""
    from thinwire.codecs.kernels.fused import selecting

    n, planes = codes.numel(), plane_count(bits)
    if planes == 1 or not n:
        return codes
    packed = torch.empty(packed_nbytes(n, bits), dtype=torch.uint8, device=codes.device)
    m = -(-n // planes)
    triton_calls.launch(
        selecting.packed_positions, (-(-m // 512),), (codes, packed), (n, m), (bits, planes, 512)
    )
    return packed


def _low(tiling: Tiling, score: Tensor, marks: Tensor) -> None:
    """Write which tiles get few bits into the first of ``marks``."""
    from thinwire.codecs.kernels.fused import tiling as kernels

    samples, lows = tiling.samples, tiling.lows // tiling.samples
    per = tiling.grid.rows // samples
    bins = torch.zeros(samples * 4 * 256, dtype=torch.int32, device=score.device)
    programs, numbers = (-(-per // _SIZE), samples), (per, lows)
    for byte in range(4):
        triton_calls.launch(kernels.byte_counted, programs, (score, bins), numbers, (_SIZE, byte))
    triton_calls.launch(kernels.compared, programs, (score, bins, marks), numbers, (_SIZE,))
    order = marks[0].view(samples, per).cumsum(1, dtype=torch.int32)
    triton_calls.launch(kernels.lowered, programs, (score, bins, order, marks), numbers, (_SIZE,))


def encoded(tiling: Tiling, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the parts of the payload of ``x``, and a flag, int32: not 0 where a value was not finite.

    How many tiles are turned is waited for.
    """
    from thinwire.codecs.kernels.fused import tiling as kernels

    x, device, tiles = x.contiguous(), x.device, tiling.grid.rows
    width, stages, last, in_row, some = tiling.shape
    score, marks = torch.empty((3, tiles), dtype=torch.int32, device=device).split([1, 2])
    flags = torch.zeros(1, dtype=torch.int32, device=device)
    programs = (-(-tiles // some),)
    triton_calls.launch(
        kernels.described,
        programs,
        (x, score, marks[1], flags),
        (tiles,),
        (width, last, in_row, some, tiling.threshold),
    )
    _low(tiling, score, marks)
    ranks = marks.cumsum(1, dtype=torch.int32)
    highs = tiles - tiling.lows
    room = torch.empty(tiles * (width + 1), dtype=torch.uint8, device=device)
    codes, pivots = room.split([tiles * width, tiles])
    stored, zeros = torch.empty((2, tiles), dtype=torch.int16, device=device)
    triton_calls.launch(
        kernels.tiled,
        programs,
        (x, marks, ranks, codes, stored.view(torch.bfloat16), zeros, pivots),
        (tiles, highs),
        (width, stages, last, in_row, some, tiling.high, tiling.low, *scales.bounds(_SCALE)),
    )
    masks = marks.to(torch.uint8)
    parts = (
        _pack(codes[: highs * width], tiling.high),
        _pack(codes[highs * width :], tiling.low),
        stored.view(torch.bfloat16),
        zeros,
        *(_pack(mask, 1) for mask in masks),
        _pack(pivots[: int(ranks[1, -1])], tiling.pivot_bits),
    )
    return parts, flags[0]


def decoded(tiling: Tiling, parts: tuple[Tensor, ...], spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Return what parts of the right dtypes, all but the last of the right lengths, stand for; and two flags.

    They tell that the masks do not fit, and that a scale is out of range.
    """
    from thinwire.codecs.kernels.fused import tiling as kernels

    high, low, stored, zeros, low_bits, lonely_bits, pivots = parts
    device, tiles, highs = high.device, tiling.grid.rows, tiling.grid.rows - tiling.lows
    width, stages, last, in_row, some = tiling.shape
    marks = torch.empty((2, tiles), dtype=torch.int32, device=device)
    triton_calls.launch(
        kernels.unmasked,
        (-(-tiles // _SIZE),),
        (low_bits, lonely_bits, marks),
        (tiles, len(low_bits)),
        (_SIZE,),
    )
    ranks = marks.cumsum(1, dtype=torch.int32)
    restored = torch.empty(spec.shape, dtype=spec.dtype, device=device)
    flags = torch.zeros(2, dtype=torch.int32, device=device)
    planes = plane_count(tiling.pivot_bits)
    ms = (_words(highs * width, tiling.high), _words(tiling.lows * width, tiling.low))
    m_pivots = len(pivots) // (planes * tiling.pivot_bits // 8)
    limit = 65504.0 if spec.dtype == torch.float16 else 0.0
    triton_calls.launch(
        kernels.untiled,
        (-(-tiles // some),),
        (high, low, stored, zeros, pivots, marks, ranks, restored, flags),
        (tiles, highs, *ms, m_pivots),
        (
            *(width, stages, last, in_row, some, tiling.high, tiling.low),
            *(tiling.pivot_bits, planes, *scales.bounds(_SCALE), limit),
        ),
    )
    return restored, flags


def _words(n: int, bits: int) -> int:
    return max(1, -(-n // plane_count(bits)))
