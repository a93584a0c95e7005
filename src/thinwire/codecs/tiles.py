"""Tile-wise adaptive quantisation, the forward codec of TAH-Quant."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.codecs import scales
from thinwire.codecs.base import Layout, check_layout, layout_nbytes
from thinwire.codecs.bits import pack, packed_nbytes, unpack
from thinwire.codecs.grid import Grid
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, PayloadError, TensorSpec, require

SCALE = "bfloat16"
BLOCK = 1 << 17  # values worked on at a time on a CPU
ZERO_TOP = 32767  # zero-points are int16: with a code and an 8-bit scale still exact in float32
_ROUNDER = 1.5 * 2**23  # adding it rounds to an integer, and leaves that in the low byte
_TINY = 1e-30  # keeps log(0) out of the entropy


@dataclass(frozen=True, repr=False)
class TileAdaptive(Spec):
    """Give flat tiles ``high`` bits and spiky ones ``low``, after moving lone outliers into the zero-point.

    A tile is ``tile`` consecutive channels of one token. In each sample the ``share`` of the tiles whose
    magnitudes have the largest entropy get ``high`` bits a value. A tile whose largest magnitude is more
    than ``threshold`` times its second is turned: the outlier is swapped to the front, and a Hadamard
    transform spreads it evenly, so that the tile's zero-point absorbs it. Each tile has a scale and a
    zero-point of 16 bits each.

    Source: TAH-Quant (He et al. 2025, arXiv 2506.01352), equations 1 to 3, known to us second-hand. Our
    reading: Shannon entropy, minus sign included, of the magnitudes over their sum; rounding to nearest;
    zero-points as integer multiples of a bfloat16 scale, so that 0 stays 0 and decoding is exact.

    Payload: codes of the high tiles, codes of the low ones, scales [tiles], zero-points int16 [tiles], one
    bit a tile for low, one for turned, and the outlier's place in each turned tile.
    Errors: ``InputError`` for a NaN or an infinity.

    >>> x = torch.tensor([[0.0, 1.0, -3.0, 40.0]])
    >>> codec = TileAdaptive(tile=4)
    >>> codec.decode(codec.encode(x)).round()
    tensor([[ 0.,  1., -3., 40.]])
    """

    tile: int = 64
    high: int = 4
    low: int = 3
    share: float = 0.8
    threshold: float = 2.0

    def __post_init__(self) -> None:
        require(
            2 <= self.tile <= 256 and self.tile & (self.tile - 1) == 0,
            InputError,
            f"tile={self.tile} is not a power of two in 2..256",
        )
        require(
            1 <= self.low <= self.high <= 8,
            InputError,
            f"low={self.low} and high={self.high} must be bits in 1..8, low at most high",
        )
        require(0 <= self.share <= 1, InputError, f"share={self.share} is not in 0..1")
        require(self.threshold >= 1, InputError, f"threshold={self.threshold} is below 1")

    def encode(self, x: Tensor) -> Payload:
        spec = TensorSpec.of(x)
        grid = self._grid(spec)
        tiles = grid.spread(x.detach().to(torch.float32).contiguous())
        entropy, lonely = self._describe(tiles)
        is_low = self._spiky(entropy, spec, grid)
        codes, stored, zeros, pivots = self._quantise(tiles, is_low, lonely)
        high = codes.index_select(0, _where(~is_low))
        low = codes.index_select(0, _where(is_low)).clamp_max_(2**self.low - 1)
        parts = (
            pack(high.flatten(), self.high),
            pack(low.flatten(), self.low),
            stored,
            zeros,
            pack(is_low.view(torch.uint8), 1),
            pack(lonely.view(torch.uint8), 1),
            pack(pivots, _bits(grid.width)),
        )
        return Payload(spec, parts)

    def decode(self, payload: Payload) -> Tensor:
        spec = payload.spec
        grid = self._grid(spec)
        is_low, turned = self._masks(payload, grid)
        _, _, stored, zeros, _, _, packed = payload.parts
        codes, step = self._codes(payload, is_low, grid), scales.load(stored, SCALE)
        pivots = unpack(packed, _bits(grid.width), int(turned.sum())).to(torch.int64)
        x, used = torch.empty(codes.shape, dtype=torch.float32, device=codes.device), 0
        for at in _blocks(codes):
            y = torch.add(codes[at], zeros[at, None], out=x[at])  # integers: exact
            if (rows := _where(turned[at])).numel():
                y.index_copy_(0, rows, _unturn(codes[at], zeros[at], rows, pivots[used : used + len(rows)]))
                used += len(rows)
            y.mul_(step[at, None])
        if spec.dtype == torch.float16:
            x.clamp_(-65504.0, 65504.0)
        return grid.gather(x).to(spec.dtype).reshape(spec.shape)

    def _codes(self, payload: Payload, is_low: Tensor, grid: Grid) -> Tensor:
        """Return the codes in the order of the tiles, uint8 [tiles, width]."""
        lows = self._lows(payload.spec, grid)
        high = unpack(payload.parts[0], self.high, (grid.rows - lows) * grid.width)
        low = unpack(payload.parts[1], self.low, lows * grid.width)
        order = torch.cat([_where(~is_low), _where(is_low)])
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return torch.cat([high, low]).view(grid.rows, grid.width).index_select(0, place)

    def nbytes(self, spec: TensorSpec) -> int:
        grid = self._grid(spec)
        return layout_nbytes(self._layout(spec, grid, grid.rows))

    def _layout(self, spec: TensorSpec, grid: Grid, turned: int) -> Layout:
        n, low = grid.rows, self._lows(spec, grid)
        return (
            (torch.uint8, packed_nbytes((n - low) * grid.width, self.high)),
            (torch.uint8, packed_nbytes(low * grid.width, self.low)),
            (scales.FORMATS[SCALE].dtype, n),
            (torch.int16, n),
            (torch.uint8, packed_nbytes(n, 1)),
            (torch.uint8, packed_nbytes(n, 1)),
            (torch.uint8, packed_nbytes(turned, _bits(grid.width))),
        )

    def _grid(self, spec: TensorSpec) -> Grid:
        last = spec.shape[-1] if spec.shape else 1
        width = min(self.tile, max(2, 1 << (last - 1).bit_length()))
        padded = -(-last // width) * width
        rows = math.prod(spec.shape[:-1]) * padded // width
        return Grid("row", rows, width, rows, last, padded)

    def _lows(self, spec: TensorSpec, grid: Grid) -> int:
        """Return how many tiles get ``low`` bits: as many in each sample."""
        samples = _samples(spec)
        per_sample = grid.rows // samples if samples else 0
        return samples * (per_sample - math.ceil(per_sample * self.share - 1e-9))

    def _describe(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Return each tile's entropy, float32 [tiles], and whether it has a lone outlier, bool [tiles]."""
        entropy, below = tiles.new_empty(len(tiles)), tiles.new_empty(len(tiles), dtype=torch.int32)
        scratch = _scratch(tiles, 2)
        for at in _blocks(tiles):
            size, spare = (t[: len(tiles[at])] for t in scratch)
            torch.abs(tiles[at], out=size)
            total, bound = size.sum(1), size.amax(1, keepdim=True).div_(self.threshold)
            # As positive floats are ordered like their bits: -1 for every magnitude below the bound.
            signs = torch.sub(size.view(torch.int32), bound.view(torch.int32), out=spare.view(torch.int32))
            torch.sum(signs.bitwise_right_shift_(31), 1, dtype=torch.int32, out=below[at])
            moment = torch.log(size.clamp_min_(_TINY), out=spare).mul_(size).sum(1)
            torch.sub(total.clamp_min_(_TINY).log(), moment.div_(total), out=entropy[at])
        return entropy, below == 1 - tiles.shape[1]  # all but the largest itself

    def _spiky(self, entropy: Tensor, spec: TensorSpec, grid: Grid) -> Tensor:
        """Return which tiles get ``low`` bits: those of least entropy in each sample, bool [tiles]."""
        is_low, samples = torch.zeros_like(entropy, dtype=torch.bool), _samples(spec)
        if n := self._lows(spec, grid):
            least = entropy.view(samples, -1).topk(n // samples, largest=False, sorted=False).indices
            is_low.view(samples, -1).scatter_(1, least, True)
        return is_low

    def _quantise(self, tiles: Tensor, is_low: Tensor, lonely: Tensor) -> tuple[Tensor, ...]:
        """Return codes uint8 [tiles, width], scales in wire form, zero-points int16 [tiles], and pivots."""
        codes = torch.empty(tiles.shape, dtype=torch.uint8, device=tiles.device)
        stored = torch.empty(len(tiles), dtype=scales.FORMATS[SCALE].dtype, device=tiles.device)
        zeros = torch.empty(len(tiles), dtype=torch.int16, device=tiles.device)
        pivots, (scratch,) = [codes[:0, 0]], _scratch(tiles, 1)
        levels = torch.where(is_low, 2.0**self.low - 1, 2.0**self.high - 1)
        for at in _blocks(tiles):
            y, pivot = _turn(tiles[at], lonely[at])
            pivots.append(pivot)
            least = y.amin(1)
            stored[at] = scales.store(_steps(least, y.amax(1), levels[at]), SCALE)
            inverse = stored[at].to(torch.float32).reciprocal_()
            zero = least.mul_(inverse).round_().clamp_(-ZERO_TOP, ZERO_TOP)
            zeros[at] = zero
            y = torch.mul(y, inverse[:, None], out=scratch[: len(y)]).sub_(zero[:, None])
            y.clamp_(0, 2**self.high - 1).add_(_ROUNDER)
            codes[at].copy_(y.view(torch.int32))  # keeps the low byte
        return codes, stored, zeros, torch.cat(pivots)

    def _masks(self, payload: Payload, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return the two masks of a payload whose parts fit them; ``PayloadError`` otherwise."""
        require(len(payload.parts) == 7, PayloadError, f"{len(payload.parts)} parts where tiles have 7")
        is_low, turned = (unpack(p, 1, grid.rows).view(torch.bool) for p in payload.parts[4:6])
        check_layout(payload, self._layout(payload.spec, grid, int(turned.sum())))
        found, expected = int(is_low.sum()), self._lows(payload.spec, grid)
        require(found == expected, PayloadError, f"{found} tiles of few bits where {expected} are expected")
        return is_low, turned


def _samples(spec: TensorSpec) -> int:
    return spec.shape[0] if len(spec.shape) > 1 else 1


def _bits(width: int) -> int:
    return max(1, (width - 1).bit_length())


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero()[:, 0]


def _blocks(tiles: Tensor) -> Iterator[slice]:
    """Yield runs of tiles whose temporaries stay in a processor's cache."""
    n = max(1, BLOCK // tiles.shape[1]) if tiles.device.type == "cpu" else max(1, len(tiles))
    for at in range(0, len(tiles), n):
        yield slice(at, at + n)


def _scratch(tiles: Tensor, n: int) -> list[Tensor]:
    """Return ``n`` tensors of the largest block: memory that is reused costs no page faults."""
    rows = next((at.stop for at in _blocks(tiles)), 0)
    return [torch.empty_like(tiles[:rows]) for _ in range(n)]


def _steps(least: Tensor, most: Tensor, levels: Tensor) -> Tensor:
    """Return the wanted scales: each tile's range over its levels, and no less than its zero-point needs."""
    steps = torch.maximum(most / levels - least / levels, torch.maximum(-least, most).div_(ZERO_TOP))
    if not bool(steps.amax().isfinite()):
        raise InputError("a NaN or infinite value cannot be quantised; look for the overflow that made it")
    return steps


def _turn(tiles: Tensor, lonely: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tiles, the lonely ones turned, and where their outliers were, uint8 [lonely]."""
    rows = _where(lonely)
    if not rows.numel():
        return tiles, rows.to(torch.uint8)
    chosen, width = tiles.index_select(0, rows), tiles.shape[1]
    pivots = chosen.abs().argmax(1)
    # The transform's norm is all on this side, a power of two: decoding is a sum of integers.
    turned = torch.mm(_swap(chosen, pivots), _hadamard(width).to(tiles.device)).mul_(1 / width)
    return tiles.index_copy(0, rows, turned), pivots.to(torch.uint8)


def _unturn(codes: Tensor, zeros: Tensor, rows: Tensor, pivots: Tensor) -> Tensor:
    """Return tiles ``rows`` turned back, in units of their scales.

    Codes of at most 8 bits times -1 or 1: exact in any order of summation, and in any precision of a matmul.
    """
    width = codes.shape[1]
    x = torch.mm(codes.index_select(0, rows).to(torch.float32), _hadamard(width).to(codes.device))
    x[:, 0] += zeros[rows].to(torch.float32) * width  # a constant's transform is all in the first place
    return _swap(x, pivots)


def _swap(tiles: Tensor, pivots: Tensor) -> Tensor:
    """Exchange, in place, the first value of each row of ``tiles`` [n, width] and the one at its pivot."""
    first, pivot = tiles[:, :1].clone(), tiles.gather(1, pivots[:, None])
    tiles.scatter_(1, pivots[:, None], first)
    tiles[:, :1] = pivot
    return tiles


@lru_cache(maxsize=8)
def _hadamard(width: int) -> Tensor:
    """Return the Hadamard matrix of -1 and 1, [width, width]."""
    h = torch.ones(1, 1)
    while len(h) < width:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h
