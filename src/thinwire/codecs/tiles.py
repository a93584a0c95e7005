"""Tile-wise adaptive quantisation, the forward codec of TAH-Quant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.codecs.codec import Layout, check_layout, layout_nbytes, saturated
from thinwire.codecs.kernels import scales, tiles_calls, triton_calls
from thinwire.codecs.kernels.bits import pack, packed_nbytes, unpack
from thinwire.codecs.kernels.scales import Grid, block_rows, scratch
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, PayloadError, TensorSpec, require
from thinwire.verdicts import refuse

SCALE = "bfloat16"
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
    finite = True

    def __post_init__(self) -> None:
        super().__post_init__()
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
        if grid.rows and triton_calls.there(x := x.detach()):
            parts, wrong = tiles_calls.encoded(self._tiling(spec, grid), x)
            refuse(wrong, _not_finite)
            return Payload(spec, parts)
        tiles = grid.spread(x.detach().to(torch.float32).contiguous())
        entropy, lonely, least, most = self._describe(tiles, grid)
        is_low, rows = self._spiky(entropy, spec, grid), _where(lonely)
        turned, pivots = _turn(tiles.index_select(0, rows))
        if len(rows):
            least.index_copy_(0, rows, turned.amin(1))
            most.index_copy_(0, rows, turned.amax(1))
        stored = scales.store(self._steps(least, most, is_low), SCALE)
        inverse = scales.load(stored, SCALE).reciprocal_()
        zeros = (least * inverse).round_().clamp_(-ZERO_TOP, ZERO_TOP)
        codes = self._round(tiles, inverse, zeros)
        if len(rows):
            codes.index_copy_(0, rows, self._round(turned, inverse[rows], zeros[rows]))
        high = codes.index_select(0, _where(~is_low))
        low = codes.index_select(0, _where(is_low)).clamp_max_(2**self.low - 1)
        parts = (
            pack(high.flatten(), self.high),
            pack(low.flatten(), self.low),
            stored,
            zeros.to(torch.int16),
            pack(is_low.view(torch.uint8), 1),
            pack(lonely.view(torch.uint8), 1),
            pack(pivots.to(torch.uint8), _bits(grid.width)),
        )
        return Payload(spec, parts)

    def decode(self, payload: Payload) -> Tensor:
        spec = payload.spec
        grid = self._grid(spec)
        if grid.rows and payload.parts and triton_calls.there(payload.parts[0]):
            return self._by_kernels(payload, grid)
        is_low, lonely = self._masks(payload, grid)
        _, _, stored, zeros, _, _, packed = payload.parts
        codes, step = self._codes(payload, is_low, grid), scales.load(stored, SCALE)
        x = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        for at, block, factor in grid.blocks(codes, step):
            end = at + len(block)
            torch.add(block, zeros[at:end, None], out=x[at:end]).mul_(factor)  # integers: exact
        if len(rows := _where(lonely)):
            pivots = unpack(packed, _bits(grid.width), len(rows)).to(torch.int64)
            turned = _unturn(codes.index_select(0, rows), zeros[rows], pivots)
            x.index_copy_(0, rows, turned.mul_(step[rows, None]))
        return saturated(grid.gather(x), spec.dtype).reshape(spec.shape)

    def _by_kernels(self, payload: Payload, grid: Grid) -> Tensor:
        spec, bits = payload.spec, _bits(grid.width)
        # As many turned tiles as there can be behind that many bytes; the kernels count them.
        some = payload.parts[-1].numel() * 8 // bits
        check_layout(payload, self._layout(spec, grid, some))
        x, wrong = tiles_calls.decoded(self._tiling(spec, grid), payload.parts, spec)
        refuse(wrong[0], lambda: PayloadError("tiles of few bits or turned ones are not as many as expected"))
        refuse(wrong[1], lambda: scales.outside(SCALE))
        return x

    def _tiling(self, spec: TensorSpec, grid: Grid) -> tiles_calls.Tiling:
        """Return what kernels are told."""
        rules = self.high, self.low, self.threshold, _bits(grid.width)
        return tiles_calls.Tiling(grid, _samples(spec), self._lows(spec, grid), *rules)

    def _codes(self, payload: Payload, is_low: Tensor, grid: Grid) -> Tensor:
        """Return the codes in the order of the tiles, uint8 [tiles, width]."""
        lows = self._lows(payload.spec, grid)
        high = unpack(payload.parts[0], self.high, (grid.rows - lows) * grid.width)
        low = unpack(payload.parts[1], self.low, lows * grid.width)
        order = torch.cat([_where(~is_low), _where(is_low)])
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        shape, device = (grid.rows, grid.width), order.device
        both = scratch(shape, torch.uint8, device, slot=2)
        torch.cat([high, low], out=both.view(-1))
        return torch.index_select(both, 0, place, out=scratch(shape, torch.uint8, device, slot=3))

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

    def _describe(self, tiles: Tensor, grid: Grid) -> tuple[Tensor, ...]:
        """Return of each tile its entropy, whether it has a lone outlier, its least and its largest value."""
        found = []
        for _, block, _ in grid.blocks(tiles):
            least, most = block.amin(1), block.amax(1)
            size = torch.abs(block, out=scratch(tuple(block.shape), torch.float32, block.device))
            bound = torch.maximum(-least, most).div_(self.threshold)
            # As positive floats are ordered like their bits: -1 for every magnitude below the bound.
            signs = scratch(tuple(block.shape), torch.int32, block.device, slot=1)
            torch.sub(size.view(torch.int32), bound.view(torch.int32)[:, None], out=signs)
            below = signs.bitwise_right_shift_(31).sum(1, dtype=torch.int32)
            total = size.sum(1).clamp_min_(_TINY)
            # A float's bits, read as a number, are its logarithm to within 0.09: enough to rank tiles by.
            logs = torch.mul(size.view(torch.int32), 2.0**-23, out=signs.view(torch.float32))
            moment = logs.mul_(size).sum(1).div_(total).sub_(127)
            found.append((total.log2().sub_(moment), below == 1 - grid.width, least, most))
        if not found:
            empty = tiles.new_empty(0)
            return empty, empty.to(torch.bool), empty, empty
        return tuple(torch.cat(column) for column in zip(*found, strict=True))

    def _spiky(self, entropy: Tensor, spec: TensorSpec, grid: Grid) -> Tensor:
        """Return which tiles get ``low`` bits: those of least entropy in each sample, bool [tiles]."""
        is_low, samples = torch.zeros_like(entropy, dtype=torch.bool), _samples(spec)
        if n := self._lows(spec, grid):
            least = entropy.view(samples, -1).topk(n // samples, largest=False, sorted=False).indices
            is_low.view(samples, -1).scatter_(1, least, True)
        return is_low

    def _steps(self, least: Tensor, most: Tensor, is_low: Tensor) -> Tensor:
        """Return the wanted scales: a tile's range over its levels, and no less than its zero-point needs."""
        levels = torch.full_like(least, 2.0**self.high - 1).masked_fill_(is_low, 2.0**self.low - 1)
        steps = torch.maximum(most / levels - least / levels, torch.maximum(-least, most) / ZERO_TOP)
        if len(steps) and not bool(steps.amax().isfinite()):
            raise _not_finite()
        return steps

    def _round(self, tiles: Tensor, inverse: Tensor, zeros: Tensor) -> Tensor:
        """Return the codes, uint8 [tiles, width]."""
        codes = torch.empty(tiles.shape, dtype=torch.uint8, device=tiles.device)
        n = block_rows(len(tiles), tiles.shape[1], tiles.device)
        for at in range(0, len(tiles), n):
            part = slice(at, at + n)
            y = scratch(tuple(tiles[part].shape), torch.float32, tiles.device)
            torch.mul(tiles[part], inverse[part, None], out=y).sub_(zeros[part, None])
            y.clamp_(0, 2**self.high - 1).add_(_ROUNDER)
            codes[part].copy_(y.view(torch.int32))  # keeps the low byte
        return codes

    def _masks(self, payload: Payload, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return the two masks of a payload whose parts fit them; ``PayloadError`` otherwise."""
        require(len(payload.parts) == 7, PayloadError, f"{len(payload.parts)} parts where tiles have 7")
        is_low, turned = (unpack(p, 1, grid.rows).view(torch.bool) for p in payload.parts[4:6])
        check_layout(payload, self._layout(payload.spec, grid, int(turned.sum())))
        found, expected = int(is_low.sum()), self._lows(payload.spec, grid)
        require(found == expected, PayloadError, f"{found} tiles of few bits where {expected} are expected")
        return is_low, turned


def _not_finite() -> InputError:
    return InputError("a NaN or infinite value cannot be quantised; look for the overflow that made it")


def _samples(spec: TensorSpec) -> int:
    return spec.shape[0] if len(spec.shape) > 1 else 1


def _bits(width: int) -> int:
    return max(1, (width - 1).bit_length())


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero()[:, 0]


def _turn(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the transform of ``tiles`` [n, width], outliers first, and where they were, int64 [n]."""
    if not len(tiles):
        return tiles, torch.empty(0, dtype=torch.int64, device=tiles.device)
    pivots, width = tiles.abs().argmax(1), tiles.shape[1]
    # The transform's norm is all on this side, a power of two: decoding is a sum of integers.
    return _transform(_swap(tiles, pivots)).mul_(1 / width), pivots


def _unturn(codes: Tensor, zeros: Tensor, pivots: Tensor) -> Tensor:
    """Return the tiles that were turned to ``codes`` and ``zeros``, in units of their scales.

    Codes of at most 8 bits times -1 or 1: exact in any order of summation, and in any precision of a matmul.
    """
    width = codes.shape[1]
    x = _transform(codes.to(torch.float32))
    x[:, 0] += zeros.to(torch.float32) * width  # a constant's transform is all in the first place
    return _swap(x, pivots)


def _swap(tiles: Tensor, pivots: Tensor) -> Tensor:
    """Exchange, in place, the first value of each row of ``tiles`` [n, width] and the one at its pivot."""
    first, pivot = tiles[:, :1].clone(), tiles.gather(1, pivots[:, None])
    tiles.scatter_(1, pivots[:, None], first)
    tiles[:, :1] = pivot
    return tiles


def _transform(tiles: Tensor) -> Tensor:
    """Return the unnormalised Hadamard transform of each row of ``tiles`` [n, width], float32."""
    with torch.autocast(tiles.device.type, enabled=False):  # a sender may run inside the model's autocast
        return torch.mm(tiles, _hadamard(tiles.shape[1]).to(tiles.device))


@lru_cache(maxsize=8)
def _hadamard(width: int) -> Tensor:
    """Return the Hadamard matrix of -1 and 1, [width, width]."""
    h = torch.ones(1, 1, dtype=torch.float32, device="cpu")  # whatever the defaults are: it is kept
    while len(h) < width:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h
