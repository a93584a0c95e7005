"""How near a picture is to another one of the same noise, on floats in 0..1."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.similarity import REACH, mse, psnr, ssim


def quality(image: Tensor, reference: Tensor) -> dict[str, float | None]:
    """Return ``psnr_db`` (None for equal pictures), ``ssim``, ``relative_l2`` and ``max_abs``, [H, W] each.

    ``ssim_window`` says in which windows ``ssim`` was measured; before it was said they were uniform, of 7.

    >>> quality(torch.zeros(16, 16), torch.zeros(16, 16))["psnr_db"] is None
    True
    """
    off = (image - reference).double()
    a, b = image.numpy(), reference.numpy()
    error = mse(a, b)
    norm = float(reference.double().norm())
    return {
        "psnr_db": psnr(error) if error else None,
        "ssim": ssim(a, b),
        "ssim_window": float(2 * REACH + 1),
        "relative_l2": float(off.norm()) / norm if norm else None,
        "max_abs": float(off.abs().max()),
    }


def averaged(found: list[dict[str, float | None]]) -> dict[str, float | None]:
    """Return the mean of each figure over several pictures, a PSNR of equal ones left out."""
    names = found[0] if found else {}
    known = {name: [f[name] for f in found if f[name] is not None] for name in names}
    return {
        name: float(torch.tensor(values, dtype=torch.float64).mean()) if values else None
        for name, values in known.items()
    }
