"""Channels of real numbers to whole ones and back: steps by class, along axes that set them apart.

Source: uniform steps and an entropy coder are within a quarter of a bit of what is possible (H. Gish and
J. N. Pierce, 1968) [from memory]. Rounding a little towards zero pays where most numbers are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinwire.assets.code.symbols import pack_classes, unpack_classes, unzigzag, zigzag
from thinwire.types import ByteCursor, PayloadError, require

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.float32]
ROUNDING = 0.45  # 0.5 is to the nearest
MOST = 1 << 29  # that a code is at most


def class_steps(step: float, most: float, classes: int) -> Steps:
    """Return the step of each class [classes]: ``step`` doubled from class to class, at most ``most``."""
    return np.minimum(step * 2.0 ** np.arange(classes), most).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Axes:
    """Axes along which channels are coded: columns of ``matrix`` [d, d], once the means [d] are off."""

    matrix: Floats
    mean: Floats

    @classmethod
    def plain(cls, values: Floats) -> Axes:
        """Return the axes that values [n, d] have."""
        middle: Floats = np.median(values, axis=0).astype(np.float32).astype(np.float64)
        return cls(np.eye(values.shape[1]), middle)

    @classmethod
    def principal(cls, values: Floats, weights: Floats) -> Axes:
        """Return those along which values [n, d] do not vary together, which count by weights [n]."""
        mean = (values * (weights / weights.sum())[:, None]).sum(0).astype(np.float32).astype(np.float64)
        apart = (values - mean) * np.sqrt(weights / weights.sum())[:, None]
        matrix = np.linalg.eigh(apart.T @ apart)[1][:, ::-1]
        return cls(matrix.astype(np.float16).astype(np.float64), mean)

    @property
    def is_plain(self) -> bool:
        """Whether they are those that the values have."""
        return bool((self.matrix == np.eye(len(self.mean))).all())

    def forward(self, values: Floats) -> Floats:
        """Return values [n, d] along the axes."""
        return np.asarray((values - self.mean) @ np.linalg.inv(self.matrix).T, np.float64)

    def inverse(self, coordinates: Floats) -> Floats:
        """Return the values of coordinates [n, d]."""
        return coordinates @ self.matrix.T + self.mean

    def pack(self) -> bytes:
        """Return them as bytes."""
        mean = self.mean.astype("<f4").tobytes()
        return bytes([self.is_plain]) + mean + (b"" if self.is_plain else self.matrix.astype("<f2").tobytes())

    @classmethod
    def unpack(cls, cursor: ByteCursor, d: int) -> Axes:
        """Return the axes that come next. Errors: ``PayloadError``."""
        plain = bool(cursor.take(1)[0])
        mean = np.frombuffer(cursor.take(4 * d), "<f4").astype(np.float64)
        if plain:
            return cls(np.eye(d), mean)
        return cls(np.frombuffer(cursor.take(2 * d * d), "<f2").astype(np.float64).reshape(d, d), mean)


@dataclass(frozen=True, eq=False)
class Channels:
    """Channels as they are coded: their axes, and coordinates [d, n] along these."""

    axes: Axes
    coordinates: npt.NDArray[np.float32]

    @classmethod
    def of(cls, values: Floats, axes: Axes) -> Channels:
        """Return values [n, d] along axes."""
        return cls(axes, np.ascontiguousarray(axes.forward(values).T, dtype=np.float32))

    def pack(self, order: npt.NDArray[np.intp], steps: Steps, counts: Sequence[int]) -> bytes:
        """Return them as bytes, in an order [n] that is class by class: ``counts`` and steps of each."""
        inverse = np.repeat(1 / steps, counts)
        parts = [self.axes.pack(), steps.astype("<f4").tobytes()]
        for column in self.coordinates:
            scaled = column[order] * inverse
            levels = np.minimum(np.abs(scaled) + np.float32(ROUNDING), MOST).astype(np.int32)
            parts.append(pack_classes(zigzag(np.where(scaled < 0, -levels, levels)), counts))
        return b"".join(parts)


def unpack_channels(data: bytes, d: int, counts: Sequence[int], what: str) -> Floats:
    """Return the values [n, d] behind ``Channels.pack``, class by class. Errors: ``PayloadError``."""
    cursor = ByteCursor(data, what)
    axes = Axes.unpack(cursor, d)
    steps = np.frombuffer(cursor.take(4 * len(counts)), "<f4")
    good = bool(np.isfinite(steps).all() and (steps > 0).all() and np.isfinite(axes.mean).all())
    require(good and bool(np.isfinite(axes.matrix).all()), PayloadError, f"{what} in steps that are none")
    own = np.repeat(steps.astype(np.float64), counts)
    columns = [unzigzag(unpack_classes(cursor, counts)) * own for _ in range(d)]
    cursor.close()
    return axes.inverse(np.stack(columns, axis=1))
