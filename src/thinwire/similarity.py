"""How near two pictures are: the one PSNR and the one SSIM of every use."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

REACH, SIGMA = 5, 1.5  # of SSIM's window
C1, C2 = 0.01**2, 0.03**2
Array = npt.NDArray[np.floating]


def mse(a: Array, b: Array) -> float:
    """Return the mean square difference of two pictures, each cut to 0..1 as a screen does."""
    return float(((np.clip(a, 0, 1).astype(np.float64) - np.clip(b, 0, 1)) ** 2).mean())


def psnr(error: float) -> float:
    """Return a mean square error in dB of full white; infinite for 0.

    >>> psnr(0.0001)
    40.0
    """
    return -10 * math.log10(error) if error > 0 else math.inf


def ssim(a: Array, b: Array) -> float:
    """Return the structural similarity of two pictures [height, width, ...], from 11 pixels, cut to 0..1.

    Source: Z. Wang et al., IEEE Transactions on Image Processing 13 (2004), windows of 11 pixels, Gaussian.
    """
    x, y = (np.clip(p, 0, 1).astype(np.float64) for p in (a, b))
    mx, my = _smooth(x), _smooth(y)
    xx, yy, xy = _smooth(x * x) - mx * mx, _smooth(y * y) - my * my, _smooth(x * y) - mx * my
    top = (2 * mx * my + C1) * (2 * xy + C2)
    return float((top / ((mx * mx + my * my + C1) * (xx + yy + C2))).mean())


def _smooth(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    window = np.exp(-(np.arange(-REACH, REACH + 1) ** 2) / (2 * SIGMA**2))
    window /= window.sum()
    for _ in (0, 1):
        n = len(x) - 2 * REACH
        x = sum((x[i : i + n] * k for i, k in enumerate(window)), np.zeros(())).swapaxes(0, 1)
    return x
