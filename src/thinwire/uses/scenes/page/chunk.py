"""A layer as a browser takes it: whole numbers as planes of bytes, in raw DEFLATE.

Browsers inflate by themselves (``DecompressionStream``), so no decoder of ours has to run there. A channel's
numbers are its lowest bytes, then the next ones. Splats lie along Morton's curve, where neighbours differ
little: a channel is coded as differences where that takes fewer bytes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.uses.scenes.code import turns
from thinwire.uses.scenes.code.grid import Grid, morton
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view.cameras import Frame

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]
# Finer than a screen's 256 levels show: about 50 dB to the pictures of what is coded.
STEPS = {
    "positions": 2.0**-13,  # of the frame's radius
    "log_scales": 1 / 16,
    "rotations": 1 / 64,
    "opacities": 1 / 255,  # of alpha, not of its logit
    "colours": 1 / 40,
    "harmonics": 1 / 32,
}
FAR = 500.0  # radii: what lies farther out is drawn here
SMALL, LARGE = -23.0, 23.0  # natural logarithms of scales
BRIGHT = 1000.0
ALONG = ("colours", "harmonics")  # attributes whose channels vary together


@dataclass(frozen=True, eq=False)
class Coding:
    """What all layers of a page share: where the scene is, and axes [d, d] that set channels apart."""

    frame: Frame
    axes: dict[str, Floats]

    @classmethod
    def of(cls, frame: Frame, scenes: Sequence[Splats]) -> Coding:
        """Return the coding of scenes of the same bands."""
        values = [_colours(scene) for scene in scenes]
        return cls(frame, {name: _axes(np.concatenate([v[name] for v in values])) for name in ALONG})


@dataclass(frozen=True, eq=False)
class Plane:
    """A channel as bytes: its numbers are ``low`` + ``step`` times what ``planes`` planes say."""

    low: float
    step: float
    planes: int
    differences: bool
    data: bytes

    @classmethod
    def of(cls, values: Floats, step: float) -> Plane:
        """Return the channel of values [n] in steps, whichever way takes fewer bytes."""
        low = float(values.min())
        codes = np.rint((values - low) / step).astype(np.int64)
        difference = np.diff(codes, prepend=0)
        zigzag: Codes = np.where(difference < 0, -2 * difference - 1, 2 * difference)
        ways = [_planes(codes), _planes(zigzag)]
        best = int(np.argmin([_ideal_nbytes(way) for way in ways]))
        return cls(low, step, len(ways[best]), best == 1, ways[best].tobytes())

    def moved(self, origin: float, unit: float) -> Plane:
        """Return the channel of values that are ``origin`` + ``unit`` times these."""
        return replace(self, low=origin + unit * self.low, step=unit * self.step)

    @property
    def about(self) -> list[float]:
        """What a browser reads it by, in as many digits as float32 has."""
        return [float(f"{self.low:.9g}"), float(f"{self.step:.9g}"), self.planes, int(self.differences)]


def coded(splats: Splats, coding: Coding) -> list[Plane]:
    """Return the channels of a scene: positions, scales, rotations' x, y, z, alpha, colours, harmonics."""
    middle, radius = np.array(coding.frame.middle), coding.frame.radius
    near = np.clip((splats.positions - middle) / radius, -FAR, FAR).astype(np.float32)
    order = np.argsort(morton(Grid.cubic(near, STEPS["positions"]).cells(near)), kind="stable")
    splats = splats.take(order)
    low, high = SMALL + min(0.0, math.log(radius)), LARGE + max(0.0, math.log(radius))
    rotations, scales = turns.smallest(splats.rotations, np.clip(splats.log_scales, low, high))
    with np.errstate(over="ignore"):
        alpha = 1 / (1 + np.exp(-splats.opacities.astype(np.float64)))
    groups = {
        "positions": near[order].astype(np.float64),
        "log_scales": scales.astype(np.float64),
        "rotations": rotations[:, 1:],
        "opacities": alpha[:, None],
    }
    groups |= {name: values @ coding.axes[name] for name, values in _colours(splats).items()}
    planes = [Plane.of(x, STEPS[name]) for name, values in groups.items() for x in values.T]
    return [plane.moved(x, radius) for plane, x in zip(planes[:3], middle, strict=True)] + planes[3:]


def deflated(planes: Sequence[Plane]) -> bytes:
    """Return channels one behind the other, as raw DEFLATE."""
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_FILTERED)
    return b"".join([*(coder.compress(plane.data) for plane in planes), coder.flush()])


def _colours(splats: Splats) -> dict[str, Floats]:
    found = {"colours": splats.colours, "harmonics": splats.harmonics.reshape(splats.count, -1)}
    return {name: np.clip(x, -BRIGHT, BRIGHT).astype(np.float64) for name, x in found.items()}


def _axes(values: Floats) -> Floats:
    """Return axes [d, d] as columns along which values [n, d] do not vary together."""
    apart = values - values.mean(0)
    return np.asarray(np.linalg.eigh(apart.T @ apart)[1].round(4), np.float64)


def _planes(codes: Codes) -> npt.NDArray[np.uint8]:
    """Return the bytes of numbers [n] as planes [k, n], the lowest first."""
    count = max(1, (int(codes.max()).bit_length() + 7) // 8)
    return np.stack([(codes >> 8 * k & 255).astype(np.uint8) for k in range(count)])


def _ideal_nbytes(planes: npt.NDArray[np.uint8]) -> float:
    """Return the bytes that a coder needs which knows how often each byte of a plane is there."""
    counts: Any = np.stack([np.bincount(plane, minlength=256) for plane in planes])
    return float((counts * np.log2(planes.shape[1] / np.maximum(counts, 1))).sum() / 8)
