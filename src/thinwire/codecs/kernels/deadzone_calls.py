"""Calls of the kernels of ``DeadZone``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs.kernels import scales, triton_calls
from thinwire.codecs.kernels.bits import packed_nbytes

SIZE = 512  # values of a plane that a program works on
_PARTS = 1024  # programs that measure
_UNITS = {"message": 0, "tensor": 1, "one": 2}
_MOST = torch.finfo(torch.float32).max


class Zone(NamedTuple):
    """What is coded how: see ``DeadZone``. ``top`` is the largest level of values without noise."""

    step: float
    offset: float
    unit: str
    dither: bool
    top: int


class Step(NamedTuple):
    """What is found out before: the step, bfloat16 [1]; the key of the noise, int64 [1]; a flag, int32."""

    stored: Tensor
    key: Tensor
    wrong: Tensor


def measured(zone: Zone, x: Tensor, held: Tensor, against: bool) -> Step:
    """Return the step and the key for ``x``, or for its difference to ``held`` if ``against``."""
    from thinwire.codecs.kernels.fused import zoning

    n, size, unit = x.numel(), 4096, _UNITS[zone.unit]
    laps = -(-n // (_PARTS * size))
    programs = -(-n // (laps * size))
    sums = torch.zeros(3, dtype=torch.int64, device=x.device)
    flags, room = sums[1:].view(torch.int32), torch.empty(4 + _PARTS, dtype=torch.int32, device=x.device)
    partial, stored, key = room[4:].view(torch.float32), room[:1].view(torch.bfloat16)[:1], room[2:4]
    key = key.view(torch.int64)
    tensors, numbers = (x, held, flags, sums, partial), (n, laps, 1 / n)
    how = size, unit, zone.dither, against
    triton_calls.launch(zoning.measured, (programs,), tensors, numbers, how, 8)
    low, high = scales.bounds("bfloat16")
    by, top = min(zone.step, _MOST), zone.top - zone.dither
    constants = (_PARTS, by, unit, top, low, high, zone.dither)
    triton_calls.launch(zoning.settled, (1,), (flags, sums, partial, stored, key), (programs,), constants)
    return Step(stored, key, flags[0])


def coded(
    zone: Zone, x: Tensor, reference: Tensor | None, table: Tensor
) -> tuple[Tensor, Tensor, Step, Tensor]:
    """Return codes, larger levels, what was found out before, and what all of them stand for.

    Of ``x`` or of its difference to ``reference``: then the latter is float32, and on top of it. How many
    levels are large is waited for.
    """
    from thinwire.codecs.kernels.fused import zoning

    x, against = x.contiguous(), reference is not None
    held = x if reference is None else reference.contiguous()
    step = measured(zone, x, held, against)
    n, m, device = x.numel(), packed_nbytes(x.numel(), 2), x.device
    programs = -(-m // SIZE)
    packed = torch.empty(m, dtype=torch.uint8, device=device)
    counts = torch.empty(4 * programs, dtype=torch.int32, device=device)
    restored = torch.empty_like(held)
    limit = _limit(torch.float32 if against else x.dtype)
    numbers = torch.empty(4 * programs * SIZE, dtype=torch.int16, device=device)
    tensors = (x, held, restored, packed, counts, numbers, step.stored, step.key, table)
    constants = (SIZE, zone.offset, _MOST, zone.dither, against, limit)
    triton_calls.launch(zoning.zoned, (programs,), tensors, (n, m), constants)
    ends = counts.cumsum(0, dtype=torch.int32)
    count = int(ends[-1])
    large = torch.empty(2 * count, dtype=torch.uint8, device=device)
    if count:
        apart = (numbers, counts, ends, large)
        triton_calls.launch(zoning.larger, (4 * programs,), apart, (count,), (SIZE,), 2)
    return packed, large, step, restored


def values(
    parts: tuple[Tensor, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    table: Tensor | None,
    reference: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what codes, larger levels, a step and perhaps a key stand for, and two flags, int32.

    They tell that the step is out of range, and that codes and levels do not fit. ``table`` is that of the
    noise, if there is any. On top of a reference the values are float32, else ``dtype``.
    """
    from thinwire.codecs.kernels.fused import zoning

    packed, large, stored, device = *parts[:3], parts[0].device
    restored = torch.empty(shape, dtype=dtype, device=device)
    n, m, against = restored.numel(), packed.numel(), reference is not None
    programs = -(-m // SIZE)
    counts = torch.empty(4 * programs, dtype=torch.int32, device=device)
    triton_calls.launch(zoning.counted, (programs,), (packed, counts), (n, m), (SIZE,))
    ends = counts.cumsum(0, dtype=torch.int32)
    held = restored if reference is None else reference.contiguous()
    dither = table is not None
    flags = torch.empty(2, dtype=torch.int32, device=device)
    key, noise = (parts[3], table) if table is not None else (ends, restored)
    triton_calls.launch(
        zoning.unzoned,
        (programs,),
        (packed, large, ends, stored, key, noise, held, restored, flags),
        (n, m, large.numel() // 2),
        (SIZE, _MOST, *scales.bounds("bfloat16"), dither, against, _limit(dtype)),
    )
    return restored, flags


def _limit(dtype: torch.dtype) -> float:
    return 65504.0 if dtype == torch.float16 else torch.finfo(dtype).max
