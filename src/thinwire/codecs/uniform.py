"""Uniform quantisation: an integer code of 1 to 8 bits a value, times a shared scale."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.codec import Layout, check_layout, layout_nbytes, saturated
from thinwire.codecs.kernels import kernel_calls, scales, uniform_calls
from thinwire.codecs.kernels.bits import pack, packed_nbytes, unpack
from thinwire.codecs.kernels.noise import add_dither, fingerprint, table
from thinwire.codecs.kernels.scales import SHARED_BY, Grid, scratch
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, TensorSpec, require
from thinwire.verdicts import FINITE, collecting, refuse_outside

ROUNDINGS = ("nearest", "stochastic")
# Bits up to which noise, always short of 1/2, cannot lift the top value to the next level.
DITHER_STAYS_INSIDE = 5
# A float32 of this size has a unit step: adding it rounds, and leaves the integer in the low byte.
_ROUNDER = 1.5 * 2**23


@dataclass(frozen=True, repr=False)
class Uniform(Spec):
    """Code each value as an integer of ``bits`` bits times a scale that ``scale`` says who shares.

    The levels are symmetric: -top..top with top = 2**(bits-1) - 1, zero among them; with 1 bit they are -1
    and 1. A scale belongs to the ``tensor``, to each ``channel`` (index of the last dimension, over all
    others, as in AQ-SGD), to each ``token`` (row of the last dimension) or to each ``group`` of ``group``
    consecutive values in a row. It is the largest magnitude over ``top``; with 1 bit and nearest rounding
    the mean magnitude (Bernstein et al. 2018, "signSGD"). ``clip`` below 1 shrinks it: outliers saturate.

    ``nearest`` rounding errs by at most half a scale. ``stochastic`` is unbiased (with ``clip=1``), and
    still a pure function of the values and ``seed``. For ``scale_dtype`` see
    ``thinwire.codecs.kernels.scales``; magnitudes above top times its largest scale saturate.

    Any shape, any float dtype (computed in float32). Errors: ``InputError`` for a NaN or an infinity, noticed
    in the scales.

    >>> x = torch.tensor([[0.0, 1.0, -3.0, 2.2]])
    >>> codec = Uniform(bits=3, group=4)
    >>> codec.decode(codec.encode(x))
    tensor([[ 0.,  1., -3.,  2.]])
    """

    bits: int = 4
    scale: str = "group"
    group: int = 32
    rounding: str = "nearest"
    seed: int = 0
    scale_dtype: str = "bfloat16"
    clip: float = 1.0
    finite = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bits in range(1, 9), InputError, f"bits={self.bits} is not in 1..8")
        require(self.group >= 1, InputError, f"group={self.group} is not a positive number of values")
        require(0 < self.clip <= 1, InputError, f"clip={self.clip} is not in (0, 1]")
        _one_of("scale", self.scale, SHARED_BY)
        _one_of("rounding", self.rounding, ROUNDINGS)
        _one_of("scale_dtype", self.scale_dtype, tuple(scales.FORMATS))

    @cached_property
    def top(self) -> int:
        """The largest level, in scales."""
        return max(1, 2 ** (self.bits - 1) - 1)

    def encode(self, x: Tensor) -> Payload:
        if fused := self._fused(x, None, False):
            return fused[0]
        codes, stored = self.quantise(x)
        return Payload(TensorSpec.of(x), (pack(codes, self.bits), stored))

    def roundtrip(self, x: Tensor) -> tuple[Payload, Tensor]:
        if fused := self._fused(x, None, True):
            return fused
        codes, stored = self.quantise(x)
        spec = TensorSpec.of(x)
        return Payload(spec, (pack(codes, self.bits), stored)), self.dequantise(codes, stored, spec)

    def roundtrip_against(self, x: Tensor, reference: Tensor) -> tuple[Payload, Tensor] | None:
        return self._fused(x, reference, True)

    def decode(self, payload: Payload) -> Tensor:
        check_layout(payload, self.layout(payload.spec))
        x = self._decoded(payload, None)
        if x is not None:
            return x
        packed, stored = payload.parts
        return self.dequantise(unpack(packed, self.bits, payload.spec.numel), stored, payload.spec)

    def decode_against(self, payload: Payload, reference: Tensor) -> Tensor | None:
        check_layout(payload, self.layout(payload.spec))
        return self._decoded(payload, reference)

    @cached_property
    def form(self) -> uniform_calls.Form:
        """What kernels are told."""
        return uniform_calls.Form(self.bits, self.scale, self.group, self.scale_dtype, self.clip)

    def _fused(self, x: Tensor, reference: Tensor | None, back: bool) -> Any:
        """Return payload and values by kernels or by a compiled pass; None where there is neither."""
        stochastic = self.rounding == "stochastic"
        found = None if stochastic else uniform_calls.roundtrip(self.form, x, reference, back)
        return found or uniform_calls.on_cpu(
            self.form, x, reference, table() if stochastic else None, self.seed
        )

    def _decoded(self, payload: Payload, reference: Tensor | None) -> Tensor | None:
        found = uniform_calls.decode(self.form, payload, reference)
        return found if found is not None else uniform_calls.decode_on_cpu(self.form, payload, reference)

    def layout(self, spec: TensorSpec) -> Layout:
        return _layout(self.form, spec.shape)

    def nbytes(self, spec: TensorSpec) -> int:
        return layout_nbytes(self.layout(spec))

    def scale_layout(self, spec: TensorSpec) -> tuple[torch.dtype, int]:
        """Return dtype and length of the stored scales."""
        return _layout(self.form, spec.shape)[1]

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of ``x``, uint8 [numel], level -top being 0, and its scales in wire form."""
        grid = self._grid(TensorSpec.of(x))
        values = grid.spread(x.detach().to(torch.float32).contiguous())
        if self._is_compiled(grid, values):
            share = self.clip / self.top
            found = kernel_calls.quantised(values, share, scales.bounds(self.scale_dtype), self.top)
            if found is not None:  # else what follows says what is wrong
                return grid.gather(found[0]), found[1]
        steps, peak = self._steps(values, grid)
        stored = scales.store(steps, self.scale_dtype)
        clips = self.clip < 1 or collecting(peak) is not None  # to clamp what needs it not changes nothing
        clips = clips or float(peak) > scales.FORMATS[self.scale_dtype].high
        codes = self._codes(values, grid, scales.expand(stored, self.scale_dtype), clips)
        return grid.gather(codes), stored

    def dequantise(self, codes: Tensor, stored: Tensor, spec: TensorSpec) -> Tensor:
        """Return the tensor of ``spec`` that ``codes`` (uint8 [numel]) and scales in wire form stand for."""
        grid = self._grid(spec)
        values, x = grid.spread(codes.reshape(spec.shape)), None
        if self._is_compiled(grid, values, stored):
            x = kernel_calls.dequantised(values, stored, scales.bounds(self.scale_dtype), self.top)
        if x is None:  # and here it is said what is wrong
            x = self._values(values, grid, scales.load(stored, self.scale_dtype))
        # a scale that was rounded up may reach just above what float16 has
        return saturated(grid.gather(x), spec.dtype).reshape(spec.shape)

    def _values(self, codes: Tensor, grid: Grid, step: Tensor) -> Tensor:
        x = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        for at, block, factor in grid.blocks(codes, step):
            levels = scratch(tuple(block.shape), torch.uint8, block.device)
            torch.sub(block, self.top, out=levels)  # modulo 256, to be read as signed
            if self.bits == 1:
                levels.add_(block)
            x[at : at + len(block)].copy_(levels.view(torch.int8)).mul_(factor)
        return x

    def _is_compiled(self, grid: Grid, *tensors: Tensor) -> bool:
        """Return whether there is a compiled pass: for the default, one bfloat16 scale a row of the grid."""
        plain = self.bits > 1 and self.rounding == "nearest" and self.scale_dtype == "bfloat16"
        return plain and grid.by == "row" and grid.rows > 0 and kernel_calls.there(*tensors)

    def _grid(self, spec: TensorSpec) -> Grid:
        return Grid.of(spec, self.scale, self.group)

    def _steps(self, values: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return the wanted scales, float32 [scales], and the largest of them."""
        if not values.numel():
            return values.new_zeros(grid.scales), values.new_zeros(())
        mean = self.bits == 1 and self.rounding == "nearest"
        steps = (grid.means(values) if mean else grid.peaks(values)).mul_(self.clip / self.top)
        peak = steps.amax()
        refuse_outside(peak, peak, FINITE, _not_finite)
        return steps, peak

    def _codes(self, values: Tensor, grid: Grid, step: Tensor, clips: bool) -> Tensor:
        codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
        dither = self.rounding == "stochastic"
        key = fingerprint(values, self.seed) if dither else 0
        inverse = (step if self.bits > 1 else step * 2).reciprocal()
        for at, block, factor in grid.blocks(values, inverse):
            y = torch.mul(block, factor, out=scratch(tuple(block.shape), torch.float32, block.device))
            if dither:
                add_dither(y.view(-1), key, at * grid.width)
            if clips or (dither and self.bits > DITHER_STAYS_INSIDE):
                y.clamp_(-self.top, self.top)
            self._round(y, codes[at : at + len(block)])
        return codes

    def _round(self, y: Tensor, codes: Tensor) -> None:
        if self.bits == 1:
            codes.copy_(y >= 0)
        else:
            codes.copy_(y.add_(_ROUNDER + self.top).view(torch.int32))  # keeps the low byte


@lru_cache(maxsize=1024)  # asked for each packet
def _layout(form: uniform_calls.Form, shape: tuple[int, ...]) -> tuple[tuple[torch.dtype, int], ...]:
    spec = TensorSpec(shape)
    n = Grid.of(spec, form.scale, form.group).scales
    codes = torch.uint8, packed_nbytes(spec.numel, form.bits)
    return codes, (scales.FORMATS[form.scale_dtype].dtype, scales.stored_numel(n, form.scale_dtype))


def _not_finite() -> InputError:
    return InputError("a NaN or infinite value cannot be quantised; look for the overflow that made it")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    require(value in choices, InputError, f"{name}={value!r} is not one of {', '.join(choices)}")
