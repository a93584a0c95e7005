"""How near a picture is to another one of the same noise, on floats in 0..1."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

WINDOW = 7  # pixels along a side of SSIM's uniform windows
SMALL, LARGE = 0.01**2, 0.03**2  # SSIM's constants (Wang et al. 2004 [memory])


def quality(image: Tensor, reference: Tensor) -> dict[str, float | None]:
    """Return ``psnr_db`` (None for equal pictures), ``ssim``, ``relative_l2`` and ``max_abs``, [H, W] each.

    >>> quality(torch.zeros(8, 8), torch.zeros(8, 8))["psnr_db"] is None
    True
    """
    off = (image - reference).double()
    error = float(off.square().mean())
    norm = float(reference.double().norm())
    return {
        "psnr_db": -10 * math.log10(error) if error else None,
        "ssim": ssim(image, reference),
        "relative_l2": float(off.norm()) / norm if norm else None,
        "max_abs": float(off.abs().max()),
    }


def ssim(image: Tensor, reference: Tensor) -> float:
    """Return the mean structural similarity over uniform windows, pictures [H, W] in 0..1."""

    def mean(x: Tensor) -> Tensor:
        return functional.avg_pool2d(x[None, None].double(), WINDOW, stride=1)

    a, b = mean(image), mean(reference)
    var_a, var_b = mean(image.square()) - a * a, mean(reference.square()) - b * b
    both = mean(image * reference) - a * b
    top = (2 * a * b + SMALL) * (2 * both + LARGE)
    return float((top / ((a * a + b * b + SMALL) * (var_a + var_b + LARGE))).mean())


def psnr_text(value: float | None, exact: bool) -> str:
    """Return dB in words.

    >>> psnr_text(None, True), psnr_text(43.21, False)
    ('equal', '43.2 dB')
    """
    if value is None:
        return "equal" if exact else "–"
    return f"{value:.1f} dB"


def averaged(found: list[dict[str, float | None]]) -> dict[str, float | None]:
    """Return the mean of each figure over several pictures, a PSNR of equal ones left out."""
    names = found[0] if found else {}
    known = {name: [f[name] for f in found if f[name] is not None] for name in names}
    return {
        name: float(torch.tensor(values, dtype=torch.float64).mean()) if values else None
        for name, values in known.items()
    }
