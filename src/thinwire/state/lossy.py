"""Lossy tensors: int32 multiples of a step, which move only when they must.

What followers use is float32(k) * float32(bound). k changes only where that is further than ``bound`` from
the tensor, and then to the nearest multiple, so values that tremble within the bound cost nothing. After
each pass abs(x - k * step) <= bound holds for every element, rounding included: what did not move was
compared with a slightly smaller bound, and what moved is checked in float64. A cast of the product to a
smaller type, and of a float64 tensor to float32, adds its own rounding; where a smaller type
adds more than the bound, the tensor is refused.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from thinwire.state.find_changes import Changes, Keep, replace
from thinwire.state.layout import Array
from thinwire.state.patch_code.indexing import where
from thinwire.types import InputError, require

_MARGIN = 1 - 2.0**-20  # more than the rounding of a float32 difference and of the bound itself
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100  # bounds that leave float32 room for multiples and fractions
_MOST = 2**24  # multiples beyond are no exact float32


def settle(
    new: Tensor,
    words: Array,
    bound: float,
    name: str = "a tensor",
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
    keep: Keep | None = None,
) -> Changes:
    """Move ``words`` (int32 [numel]) until they are within ``bound`` of ``new``, and return what changed.

    ``bound`` is in the units of ``new``; ``whole`` and ``keep`` as in ``changed``; followers use ``dtype``.
    NaN, infinity and values too large for the bound (over about 2**22 of it, or where ``dtype`` rounds by
    more) are an ``InputError`` that names the tensor; then nothing moved.

    >>> words = np.zeros(3, dtype=np.int32)
    >>> settle(torch.tensor([0.9, 1.0, -2.6]), words, 1.0).positions.tolist(), words.tolist()
    ([1, 2], [0, 1, -3])
    """
    if words.dtype != np.int32:
        raise InputError(f"{name}: multiples held as {words.dtype}, expected int32")
    step = _step(bound, name)
    near = np.float32(bound * _MARGIN)

    def moved(piece: Tensor, held: Array) -> Array:
        x = piece.to("cpu", torch.float32).numpy()
        error = np.abs(x - held.astype(np.float32) * step)
        far = where(~(error <= near))  # NaN is never near
        now = held.copy()
        now[far] = _nearest(x[far], step, bound, name)
        _check_told(now[far].astype(np.float32) * step, bound, dtype, name)
        return now

    with np.errstate(invalid="ignore", over="ignore"):
        return replace(new, words, moved, name, whole, keep)


def settle_there(x: Tensor, held: Tensor, bound: float, dtype: torch.dtype, into: Tensor) -> Tensor:
    """Write into ``into`` what ``settle`` makes of the words ``held`` [n], on the device of them all.

    Returns, as one truth there, whether a value does not fit its bound. Each step rounds as numpy's does.
    """
    step, near = (
        torch.full((), float(_step(bound, "a tensor")), device=x.device),
        float(np.float32(bound * _MARGIN)),
    )
    x = x.float()
    far = ~((x - held.float() * step).abs() <= near)  # NaN is never near
    multiples = (x / step).round()
    told = multiples * step
    fits = ((x.double() - told.double()).abs() <= bound) & (multiples.abs() < _MOST)
    if dtype.itemsize < told.itemsize:
        fits &= (told.to(dtype).double() - told.double()).abs() <= bound
    into.copy_(torch.where(far, multiples.to(into.dtype), held))
    return (far & ~fits).any()


def _nearest(x: Array, step: np.float32, bound: float, name: str) -> Array:
    multiples = np.rint(x / step)
    exact = np.abs(x.astype(np.float64) - (multiples * step).astype(np.float64)) <= bound
    if not bool((exact & (np.abs(multiples) < _MOST)).all()):
        finite = bool(np.isfinite(x).all())
        what = f"values up to {np.abs(x).max()}, too large for it" if finite else "NaN or infinity"
        raise InputError(f"{name} has {what}; it cannot be kept within a bound of {bound}")
    return multiples.astype(np.int32)


def _check_told(held: Array, bound: float, dtype: torch.dtype, name: str) -> None:
    """Raise ``InputError`` where ``dtype`` rounds one of ``held``, float32 [n], by more than the bound."""
    if dtype.itemsize >= held.itemsize:
        return
    told = torch.from_numpy(held).to(dtype).double().numpy()
    if not bool((np.abs(told - held) <= bound).all()):
        raise InputError(
            f"{name} has values up to {np.abs(held).max():.6g}, which {dtype} cannot hold within a bound of "
            f"{bound}; publish it as float32, or give a larger bound"
        )


def _step(bound: float, name: str) -> np.float32:
    good = math.isfinite(bound) and _SMALLEST <= bound <= _LARGEST
    require(good, InputError, f"{name}: a bound of {bound} is not in 2**-100..2**100")
    return np.float32(bound)
