"""One step for a whole tensor, a wide zero, and few bits for what is left: made for the entropy coder.

Layout: levels -1, 0, 1 as two bits each (0, 1, 2), where 3 stands for a larger one; those follow in order as
16-bit numbers 2q or -2q - 1 (zigzag), all low bytes before all high ones; then the step, and with dither the
key of its noise. An entropy coder sees four levels a byte, so a level may cost a quarter of a bit, and high
bytes of zeros, which cost nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.kernels import deadzone_calls, kernel_calls, scales, triton_calls
from thinwire.codecs.kernels.bits import pack, packed_nbytes, unpack
from thinwire.codecs.kernels.noise import dithered, fingerprint, table, table_on
from thinwire.spec import Spec
from thinwire.types import InputError, Payload, PayloadError, TensorSpec, require
from thinwire.verdicts import refuse

UNITS = ("message", "tensor", "one")
TOP = 32767  # a level of 15 bits times a step of 8 significant ones is exact in float32
_LARGE = 3
_MOST = torch.finfo(torch.float32).max
_SAFE = 2.0**112  # no level of a step up to it comes near that, noise or not


@dataclass(frozen=True, repr=False)
class DeadZone(Spec):
    """Code each value as a multiple of one step: ``step`` times the mean magnitude of the values.

    The level of x is floor(|x| / step + ``offset``) with the sign of x: an ``offset`` of 1/2 rounds to
    nearest, a smaller one widens the zone that becomes zero. Every value then errs alike, whatever the size
    of its neighbours, which is what least squared error asks for (reverse water-filling), and an entropy
    coder makes the small ones cheap: put this inside ``Entropy``. Without one it costs 2 bits a value and 16
    more for each level beyond 1. Levels end at 32767: the step grows where that would not reach.

    ``unit`` says the magnitude of which values is meant, for a residual: that of the ``message`` itself, so
    that it costs about the same bits whatever its size, or that of the ``tensor`` it is the residual of, so
    that it errs alike at each visit and costs less where there is less to say. ``one`` is an absolute step.

    Source: uniform threshold quantiser with entropy coding (Sullivan 1996, "Efficient scalar quantization of
    exponential and Laplacian random variables") [second-hand]; the offset as in video coding [derived].

    Any shape, any float dtype (computed in float32). Errors: ``InputError`` for a NaN or an infinity.

    >>> x = torch.tensor([0.1, -0.2, 1.0, -3.1])  # mean magnitude 1.1, so the step is 1.1
    >>> codec = DeadZone(step=1.0)
    >>> codec.decode(codec.encode(x))
    tensor([ 0.0000,  0.0000,  1.1016, -3.3047])
    """

    step: float = 1.0
    offset: float = 0.4
    unit: str = "message"
    dither: bool = False
    finite = True
    part_forms = (1, 2), (2, 8)  # of codes and of large levels: what ``Entropy`` may know of them

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.step > 0, InputError, f"step={self.step} is not above 0")
        require(0 <= self.offset <= 0.5, InputError, f"offset={self.offset} is not in 0..0.5")
        require(self.unit in UNITS, InputError, f"unit={self.unit!r} is not one of {', '.join(UNITS)}")
        nearest = self.offset == 0.5 or not self.dither
        require(nearest, InputError, f"offset={self.offset} with dither; take 0.5, or leave dither out")

    @property
    def by_tensor(self) -> bool:
        """Whether it looks at the tensor that it codes a residual of."""
        return self.unit == "tensor"

    def tuned(self, x: Tensor) -> DeadZone:
        """Return the codec for residuals of ``x``; what it encodes, this one decodes."""
        if not self.by_tensor or not x.numel():
            return self
        return replace(self, step=self._step_by(x), unit="one")

    def _step_by(self, x: Tensor) -> float:
        """Return the step for residuals of ``x``."""
        mean = float(_mean(x.detach().to(torch.float32).reshape(-1).abs()))
        return min(max(mean * self.step, scales.FORMATS["bfloat16"].low), _MOST)

    def encode(self, x: Tensor) -> Payload:
        return self.roundtrip(x)[0]

    def roundtrip(self, x: Tensor) -> tuple[Payload, Tensor]:
        if fused := self._fused(x, None):
            return fused
        spec, values = TensorSpec.of(x), x.detach().to(torch.float32).reshape(-1)
        stored = scales.store(self._step(values), "bfloat16")
        step = scales.expand(stored, "bfloat16")
        if not self.dither:
            codes, found = self._coded(values, step)
            return Payload(spec, (*codes, stored)), _shaped(found, spec, step)
        key = fingerprint(values)
        codes, found = self._coded(_finite(dithered(values, key, step), step), step)
        parts = *codes, stored, stored.new_full(stored.shape, key - (1 << 63), dtype=torch.int64)
        return Payload(spec, parts), _shaped(dithered(found, key, step, -1), spec, step)

    def roundtrip_against(self, x: Tensor, reference: Tensor) -> tuple[Payload, Tensor] | None:
        return self._fused(x, reference)

    def decode(self, payload: Payload) -> Tensor:
        spec, x = payload.spec, self.decode_against(payload, None)
        if x is not None:
            return x
        packed, large, stored, *key = self._parts(payload)
        step = scales.load(stored, "bfloat16")
        found = _values(packed, large, spec.numel, step)
        if self.dither and spec.numel:
            found = dithered(found, int(key[0]) + (1 << 63), step, -1)
        return _shaped(found, spec, step)

    def decode_against(self, payload: Payload, reference: Tensor | None) -> Tensor | None:
        """Return what a payload stands for, on top of ``reference`` or alone, by kernels."""
        spec, parts = payload.spec, self._parts(payload)
        fits = spec.numel > 0 and (reference is None or spec.dtype == torch.float32)
        if not fits or not triton_calls.there(parts[0], reference):
            compiled = fits and spec.dtype == torch.float32 and kernel_calls.there(*parts)
            compiled = compiled and kernel_calls.fits(reference, spec.shape)
            return kernel_calls.unzoned(parts, reference, spec.shape, self._noise) if compiled else None
        n, (codes, large) = spec.numel, (part.numel() for part in parts[:2])
        require(codes == packed_nbytes(n, 2), PayloadError, f"{codes} bytes do not hold {n} codes of 2 bits")
        require(large % 2 == 0, PayloadError, f"{large} bytes of large levels, expected two each")
        noise = table_on(parts[0].device) if self.dither else None
        x, wrong = deadzone_calls.values(parts, spec.shape, spec.dtype, noise, reference)
        refuse(wrong[0], lambda: scales.outside("bfloat16"))
        refuse(wrong[1], lambda: PayloadError(f"{large} bytes do not hold the large levels"))
        return x

    def _fused(self, x: Tensor, reference: Tensor | None) -> tuple[Payload, Tensor] | None:
        """Return what ``roundtrip``, or ``roundtrip_against``, does by kernels; None where there are none."""
        x = x.detach()
        if not x.numel() or not triton_calls.there(x, reference):
            return self._on_cpu(x, reference) if x.numel() and x.is_cpu else None
        noise = table_on(x.device) if self.dither else x
        packed, large, step, restored = deadzone_calls.coded(self._zone, x, reference, noise)
        refuse(step.wrong, _not_finite)
        spec = TensorSpec(tuple(x.shape), x.dtype if reference is None else torch.float32)
        key = (step.key,) if self.dither else ()
        return Payload(spec, (packed, large, step.stored, *key)), restored

    def _on_cpu(self, x: Tensor, reference: Tensor | None) -> tuple[Payload, Tensor] | None:
        """Return what ``_fused`` does, by a compiled pass; None where it cannot, or a value is not finite."""
        shape, against = tuple(x.shape), reference is not None
        known = self.by_tensor or self.unit == "one" or not against  # else the mean is of what is left
        if not known or not (against or x.dtype == torch.float32):
            return None
        values = x.to(torch.float32).contiguous()
        if not kernel_calls.against(values, reference):
            return None
        by = min(self.step, _MOST)
        if self.by_tensor and against:
            by = self._step_by(values)
        elif self.unit != "one":  # as float32, one at a time, is multiplied
            by = float(_mean(values.reshape(-1).abs())) * float(np.float32(by))
        found = kernel_calls.zoned(values, reference, by, self.offset, TOP - self.dither, self._noise)
        return None if found is None else (Payload(TensorSpec(shape), tuple(found[0])), found[1])

    @property
    def _noise(self) -> Tensor | None:
        """The table of the noise, where there is any."""
        return table() if self.dither else None

    @cached_property
    def _zone(self) -> deadzone_calls.Zone:
        """What kernels are told."""
        return deadzone_calls.Zone(self.step, self.offset, self.unit, self.dither, TOP)

    def nbytes(self, spec: TensorSpec) -> int:
        return packed_nbytes(spec.numel, 2) + 2 * spec.numel + (10 if self.dither else 2)

    def _step(self, values: Tensor) -> Tensor:
        """Return the wanted step, float32 [1], or [0] for no values."""
        if not values.numel():
            return values.new_zeros(0)
        sizes = values.abs()
        least = sizes.amax() / (TOP - self.dither)  # noise may lift the largest by one level
        mean = _mean(sizes)  # in any unit, for what is not finite
        by = min(self.step, _MOST)  # a larger one is no float32
        step = values.new_full((1,), by) if self.unit == "one" else mean.mul_(by).reshape(1)
        return torch.maximum(step, least)

    def _coded(self, values: Tensor, step: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return codes and large levels of values, and what both stand for."""
        if values.numel() and kernel_calls.there(values):
            *codes, found = kernel_calls.levels(values, float(step.reciprocal()), self.offset, float(step))
            return codes, found
        levels = self._levels(values, step)
        # Of -1, which becomes 255, and 3, which stands for all above, the low bits are 3.
        small = (levels + 1).clamp_(-1, _LARGE).to(torch.uint8).bitwise_and_(_LARGE)
        return [pack(small, 2), _bytes(levels[small == _LARGE])], levels.to(torch.float32).mul_(step)

    def _levels(self, values: Tensor, step: Tensor) -> Tensor:
        y = values * step.reciprocal()
        y.add_(torch.full_like(y, self.offset).copysign_(y))
        return y.clamp_(-TOP, TOP).to(torch.int16)  # which cuts off what is behind the point

    def _parts(self, payload: Payload) -> tuple[Tensor, ...]:
        found = tuple(p.dtype for p in payload.parts)
        if found != (torch.uint8, torch.uint8, torch.bfloat16, *(torch.int64,) * self.dither):
            raise PayloadError(f"a dead-zone payload has parts of {found}")
        for part, of in zip(payload.parts[2:], ("steps", "keys of noise"), strict=False):
            if part.numel() != min(1, payload.spec.numel):
                raise PayloadError(f"a dead-zone payload has {part.numel()} {of}, expected one")
        return payload.parts


@lru_cache(maxsize=256)
def step_for(bits: float, offset: float = 0.4) -> float:
    """Return the ``step`` at which values of a Laplacian distribution take ``bits`` bits each, entropy-coded.

    Deltas and gradients of language models take 0.9 to 1.1 times as many [measured]. The level is zero with
    probability 1 - exp((offset - 1) step), and each further one exp(-step) times as likely as the one before,
    which gives the entropy [derived]. Below one bit the entropy coder falls behind it. Errors: ``InputError``
    for bits outside 0.5..8.

    >>> step_for(2.4)
    0.977
    """
    require(0.5 <= bits <= 8, InputError, f"{bits} bits a value are not in 0.5..8")
    low, high = 1e-4, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _laplacian_bits(middle, offset) > bits else (low, middle)
    return round(low, 3)  # what is printed stays short


def _laplacian_bits(step: float, offset: float) -> float:
    beyond_zero, beyond_next = math.exp((offset - 1) * step), math.exp(-step)
    return _binary(beyond_zero) + beyond_zero * (1 + _binary(beyond_next) / (1 - beyond_next))


def _binary(p: float) -> float:
    """Return the entropy of a yes with probability ``p``."""
    return -sum(q * math.log2(q) for q in (p, 1 - p) if q > 0)


def _mean(sizes: Tensor) -> Tensor:
    """Return the mean of magnitudes, which it overwrites."""
    mean = sizes.mul_(1 / sizes.numel()).sum()  # divided before the sum, which so cannot overflow
    if not math.isfinite(mean):
        raise _not_finite()
    return mean


def _not_finite() -> InputError:
    return InputError("a NaN or infinite value cannot be quantised; look for the overflow that made it")


def _values(packed: Tensor, large: Tensor, n: int, step: Tensor) -> Tensor:
    """Return what codes and large levels stand for, float32 [n]; ``PayloadError`` where they do not fit."""
    if n and kernel_calls.there(packed, large):
        found = kernel_calls.values(packed, large, n, float(step))
        if found is not None:  # else what follows says what is wrong
            return found
    codes = unpack(packed, 2, n)
    levels, wide = codes.to(torch.int16).sub_(1), codes == _LARGE
    count = int(wide.sum())
    if large.numel() != 2 * count:
        raise PayloadError(f"{large.numel()} bytes for {count} large levels, expected two each")
    levels.masked_scatter_(wide, _numbers(large))
    return levels.to(torch.float32).mul_(step)


def _shaped(x: Tensor, spec: TensorSpec, step: Tensor) -> Tensor:
    if spec.dtype == torch.float16:
        x.clamp_(-65504.0, 65504.0)
    elif spec.dtype == torch.bfloat16:
        x = _finite(x, step, torch.finfo(torch.bfloat16).max)
    else:
        x = _finite(x, step)
    return x.to(spec.dtype).reshape(spec.shape)


def _finite(x: Tensor, step: Tensor, most: float = _MOST) -> Tensor:
    """Clamp ``x``, multiples of ``step`` and noise, in place: half a step over what was finite is too."""
    return x.clamp_(-most, most) if x.numel() and float(step) > _SAFE else x


def _bytes(levels: Tensor) -> Tensor:
    """Return int16 [n] as uint8 [2n]: the low bytes of the zigzag numbers, then the high ones."""
    numbers = (levels << 1) ^ (levels >> 15)
    return torch.cat([numbers & 0xFF, (numbers >> 8) & 0xFF]).to(torch.uint8)


def _numbers(stored: Tensor) -> Tensor:
    low, high = stored.to(torch.int16).reshape(2, -1)
    numbers = low | (high << 8)
    return ((numbers >> 1) & TOP) ^ -(numbers & 1)
