"""Calls of the kernels of ``Uniform``: what they are to do, worked out once for each codec and shape."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs.kernels import kernel_calls, scales, triton_calls
from thinwire.codecs.kernels.bits import packed_nbytes, plane_count
from thinwire.codecs.kernels.scales import Grid
from thinwire.types import InputError, Payload, TensorSpec
from thinwire.verdicts import refuse

SIZE = 512  # values of a plane that a program works on: four of each thread, in whole words of memory
WIDEST = 4096  # values of a group that a program can hold
_FORMS = {"bfloat16": 0, "float16": 1, "e5m3": 2}
_FLAT, _ROWS, _COLUMN, _WHOLE = range(4)


class Form(NamedTuple):
    """A quantiser, and how many values a Hadamard transform mixes before it: 0 for none."""

    bits: int
    scale: str
    group: int
    scale_dtype: str
    clip: float
    block: int = 0


class Plan(NamedTuple):
    """What kernels are to do with a tensor of some shape."""

    grid: Grid
    n: int
    m: int  # values of a plane
    planes: int
    codes: int  # bytes of codes
    room: int  # bytes of codes and scales
    stored: int  # elements of stored scales
    dtype: torch.dtype  # of these
    aligned: bool  # whether a plane is whole groups, and a group's scale stands alone
    limit: float  # of the values' dtype, 0 for none

    @property
    def shared(self) -> int:
        if self.grid.by == "row":
            return _FLAT if self.grid.padded == self.grid.last else _ROWS
        return _COLUMN if self.grid.by == "column" else _WHOLE

    @property
    def in_row(self) -> int:
        return max(1, self.grid.padded // self.grid.width)


@lru_cache(maxsize=1024)
def plan(form: Form, spec: TensorSpec) -> Plan | None:
    """Return what is to be done, or None where no kernel can: for one bit, for no values, for odd blocks."""
    n, p = spec.numel, plane_count(form.bits)
    if form.bits < 2 or not n:
        return None
    grid, m = Grid.of(spec, form.scale, form.group), -(-n // p)
    unit = max(grid.width, form.block)
    whole = grid.by == "row" and grid.padded == grid.last and not m % unit and not unit & (unit - 1)
    whole = whole and not (grid.width & (grid.width - 1)) and unit <= WIDEST
    if form.block and (not whole or grid.last % form.block or form.scale_dtype == "e5m3"):
        return None
    codes, stored = packed_nbytes(n, form.bits), scales.stored_numel(grid.scales, form.scale_dtype)
    dtype = scales.FORMATS[form.scale_dtype].dtype
    room = -(-codes // 16) * 16 + stored * dtype.itemsize
    limit = 65504.0 if spec.dtype == torch.float16 else 0.0
    return Plan(grid, n, m, p, codes, room, stored, dtype, whole and form.scale_dtype != "e5m3", limit)


def roundtrip(
    form: Form, x: Tensor, reference: Tensor | None, back: bool
) -> tuple[Payload, Tensor | None] | None:
    """Return the payload of ``x``, or of its difference to ``reference``, and what it restores if ``back``.

    None where no kernel can. Errors: ``InputError`` for a NaN or an infinity.
    """
    x = x.detach()
    if not triton_calls.there(x, reference):
        return None
    spec = TensorSpec(tuple(x.shape), x.dtype if reference is None else torch.float32)
    do = plan(form, spec)
    if do is None:
        return None
    parts, restored, flags = quantised(form, do, x, reference, back)
    refuse(flags[0], _not_finite)
    return Payload(spec, parts), restored


def decode(form: Form, payload: Payload, reference: Tensor | None) -> Tensor | None:
    """Return what a payload of the right layout stands for, on top of ``reference`` or alone.

    None where no kernel can. Errors: ``PayloadError`` for a scale that no encoder writes.
    """
    packed, stored = payload.parts
    fits = reference is None or payload.spec.dtype == torch.float32
    do = plan(form, payload.spec) if fits and triton_calls.there(packed, reference) else None
    if do is None:
        return None
    restored, flags = dequantised(form, do, packed, stored, payload.spec, reference)
    refuse(flags[0], lambda: scales.outside(form.scale_dtype))
    return restored


@lru_cache(maxsize=1024)
def _rows(form: Form, shape: tuple[int, ...]) -> tuple[kernel_calls.Rows, kernel_calls.Scale] | None:
    """Return what a compiled pass is told, or None where there is none for this."""
    spec = TensorSpec(shape)
    grid = Grid.of(spec, form.scale, form.group)
    if form.bits < 2 or form.scale_dtype != "bfloat16" or not spec.numel or grid.padded != grid.last:
        return None
    rows, width = (1, spec.numel) if grid.by == "whole" else (grid.rows, grid.width)
    scale = kernel_calls.Scale(form.clip / (2 ** (form.bits - 1) - 1), *scales.bounds(form.scale_dtype))
    codes = packed_nbytes(spec.numel, form.bits)
    return kernel_calls.Rows(rows, width, grid.by == "column", form.bits, grid.scales, codes), scale


def on_cpu(
    form: Form, x: Tensor, reference: Tensor | None, noise: Tensor | None, seed: int
) -> tuple[Payload, Tensor] | None:
    """Return what ``roundtrip`` does, by a compiled pass; ``noise``: its table, for stochastic rounding.

    None where there is none, or where a value is not finite.
    """
    shape = tuple(x.shape)
    fits = x.is_cpu and (x.dtype == torch.float32 or reference is not None)
    do = _rows(form, shape) if fits else None
    if do is None:
        return None
    values = x.detach().to(torch.float32).contiguous()
    if not kernel_calls.against(values, reference):
        return None
    found = kernel_calls.uniform(values, reference, *do, noise, seed)
    return None if found is None else (Payload(TensorSpec(shape), found[:2]), found[2])


def decode_on_cpu(form: Form, payload: Payload, reference: Tensor | None) -> Tensor | None:
    """Return what ``decode`` does, by a compiled pass; None where there is none, or for a wrong scale."""
    spec, (packed, stored) = payload.spec, payload.parts
    do = _rows(form, spec.shape) if packed.is_cpu and spec.dtype == torch.float32 else None
    if do is None or not kernel_calls.there(packed, stored) or not kernel_calls.fits(reference, spec.shape):
        return None
    return kernel_calls.ununiform(packed, stored, reference, spec.shape, *do)


def quantised(
    form: Form, do: Plan, x: Tensor, reference: Tensor | None, back: bool
) -> tuple[tuple[Tensor, Tensor], Tensor | None, Tensor]:
    """Return codes and scales of ``x`` or of its difference to ``reference``, and what these stand for.

    The latter, float32 with a reference and as ``x`` without, if ``back``. Last, a flag, int32: not 0 where a
    value was not finite.
    """
    from thinwire.codecs.kernels.fused import quantising

    x = x.contiguous()
    packed, stored = _room(do, x.device)
    restored = torch.empty_like(x if reference is None else reference) if back else x
    f, against = scales.FORMATS[form.scale_dtype], reference is not None
    held = x if reference is None else reference.contiguous()
    rule = (form.bits, do.planes, form.clip / (2 ** (form.bits - 1) - 1), f.low, f.high, 23 - f.mantissa)
    limit = do.limit if not against else 0.0
    numbers: tuple[int, ...]
    if do.aligned:  # one pass
        flags = torch.zeros(1, dtype=torch.int32, device=x.device)
        size = max(SIZE, do.grid.width, form.block)
        kernel, numbers = quantising.by_groups, (do.n, do.m)
        shape: tuple[int, ...] = (do.grid.width, size // do.grid.width, form.block, _stages(form))
    else:
        flags, size = _peaks(form, do, x, held, against), SIZE
        kernel, numbers = quantising.by_peaks, (do.n, do.m, do.grid.scales)
        form_number = _FORMS[form.scale_dtype]
        shape = (form_number, do.shared, do.grid.width, do.grid.last, do.in_row, size)
    tensors = (x, held, restored, packed, stored, flags)
    constants = (*rule, *shape, against, back, limit)
    triton_calls.launch(kernel, (-(-do.m // size),), tensors, numbers, constants)
    return (packed, stored), restored if back else None, flags


def _room(do: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where codes and scales go: in one piece, which is copied to the host as it is."""
    room = torch.empty(do.room, dtype=torch.uint8, device=device)
    return room[: do.codes], room[do.room - do.stored * do.dtype.itemsize :].view(do.dtype)


def _peaks(form: Form, do: Plan, x: Tensor, held: Tensor, against: bool) -> Tensor:
    """Return the flags, with the largest magnitude of each scale behind them."""
    from thinwire.codecs.kernels.fused import quantising

    grid, overall = do.grid, form.scale_dtype == "e5m3"
    flags = torch.zeros(2 + grid.scales, dtype=torch.int32, device=x.device)
    if grid.by == "row":
        wide = min(1024, _power(grid.width))
        some = 4096 // wide
        shape = (grid.width, grid.last, do.in_row, some, wide, against, overall)
        kernel, tensors = quantising.peaks_of_rows, (x, held, flags)
        triton_calls.launch(kernel, (-(-grid.rows // some),), tensors, (grid.rows,), shape)
        return flags
    wide = min(128, _power(grid.last))
    tall, rows = 2048 // wide, do.n // grid.last
    sizes = (grid.last, tall, wide, against, grid.by == "whole", overall)
    programs = (-(-rows // (16 * tall)), -(-grid.last // wide))
    triton_calls.launch(quantising.peaks_of_columns, programs, (x, held, flags), (rows,), sizes)
    return flags


def dequantised(
    form: Form, do: Plan, packed: Tensor, stored: Tensor, spec: TensorSpec, reference: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what codes and scales stand for, and a flag: not 0 where a scale is out of range.

    On top of a reference it is float32, else of ``spec``.
    """
    from thinwire.codecs.kernels.fused import quantising

    against, f, device = reference is not None, scales.FORMATS[form.scale_dtype], packed.device
    restored = torch.empty(spec.shape, dtype=torch.float32 if against else spec.dtype, device=device)
    held = restored if reference is None else reference.contiguous()
    flags = torch.zeros(1, dtype=torch.int32, device=device)
    size = max(SIZE, form.block)
    constants = (
        *(form.bits, do.planes, f.low, f.high, _FORMS[form.scale_dtype], do.shared),
        *(do.grid.width, do.grid.last, do.in_row, size),
        *(form.block, _stages(form), against, 0.0 if against else do.limit),
    )
    tensors, numbers = (packed, stored, held, restored, flags), (do.n, do.m, do.grid.scales)
    triton_calls.launch(quantising.dequantised, (-(-do.m // size),), tensors, numbers, constants)
    return restored, flags


def _stages(form: Form) -> int:
    return max(0, form.block.bit_length() - 1)


def _power(n: int) -> int:
    """Return the least power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def _not_finite() -> InputError:
    return InputError("a NaN or infinite value cannot be quantised; look for the overflow that made it")
