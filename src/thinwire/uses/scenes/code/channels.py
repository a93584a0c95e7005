"""Channels of real numbers to whole ones and back: steps by class, along axes that set them apart.

Source: uniform steps and an entropy coder are within a quarter of a bit of what is possible (H. Gish and
J. N. Pierce, 1968) [from memory]. Rounding a little towards zero pays where most numbers are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from thinwire.codecs.symbols import (
    ESCAPE,
    Ints,
    entropy,
    pack_classes,
    unpack_classes,
    unzigzag,
    zigzag,
)
from thinwire.types import ByteCursor, PayloadError, require

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.float32]
Transform = Callable[[npt.NDArray[np.floating]], Floats]  # of one column, class by class
ROUNDING = 0.45  # 0.5 is to the nearest
MOST = 1 << 29  # that a code is at most
RATIO = 3  # of coarse steps to fine ones: each coarse cell holds whole fine ones, and its middle is one's


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

    def numbers(
        self,
        order: npt.NDArray[np.intp],
        steps: Steps,
        counts: Sequence[int],
        transform: Transform | None = None,
    ) -> Numbers:
        """Return them in whole steps, in an order [n] class by class: ``counts`` and steps of each.

        Columns that take fewer bits once they are transformed, at an equal error, are.
        """
        inverse, transformed = np.repeat(1 / steps, counts), list[int]()
        columns = np.empty((len(self.coordinates), len(order)), np.int32)
        for i, column in enumerate(self.coordinates):
            scaled = column[order] * inverse
            columns[i] = rounded(scaled)
            if transform is not None:
                other = np.asarray(transform(scaled), np.float32)
                numbers = rounded(other)
                if _bits(numbers, other, counts) < _bits(columns[i], scaled, counts):
                    columns[i] = numbers
                    transformed.append(i)
        return Numbers(self.axes, steps, tuple(counts), columns, tuple(transformed))


@dataclass(frozen=True, eq=False)
class Numbers:
    """Channels in whole steps: ``columns`` [d, n] are class by class, ``counts`` and ``steps`` of each."""

    axes: Axes
    steps: Steps
    counts: tuple[int, ...]
    columns: Ints
    transformed: tuple[int, ...] = ()  # columns that are coefficients, of numbers in steps

    def coarser(self, most: float) -> Numbers:
        """Return these numbers in three times their steps, but for steps that would be more than ``most``."""
        wider = self.steps * np.float32(RATIO)
        widened = wider <= np.float32(most)
        if self.transformed:  # of all classes together
            widened[:] = widened[np.array(self.counts) > 0].all()
        columns = np.where(np.repeat(widened, self.counts), _third(self.columns), self.columns)
        return replace(self, steps=np.where(widened, wider, self.steps), columns=columns)

    def values(self, back: Transform | None = None) -> Floats:
        """Return what they stand for [n, d], class by class; ``back`` undoes a transform."""
        own = np.repeat(self.steps.astype(np.float64), self.counts)
        columns = [column.astype(np.float64) for column in self.columns]
        if back is not None:
            for i in self.transformed:
                columns[i] = back(columns[i])
        return self.axes.inverse(np.stack([column * own for column in columns], axis=1))

    def pack(self) -> bytes:
        """Return them as bytes."""
        head = self.axes.pack() + self.steps.astype("<f4").tobytes()
        head += bytes([len(self.transformed), *self.transformed])
        return head + b"".join(pack_classes(zigzag(column), self.counts) for column in self.columns)

    @classmethod
    def unpack(cls, data: bytes, d: int, counts: Sequence[int], what: str) -> Numbers:
        """Return the numbers behind ``pack``. Errors: ``PayloadError``."""
        cursor = ByteCursor(data, what)
        axes = Axes.unpack(cursor, d)
        steps = np.frombuffer(cursor.take(4 * len(counts)), "<f4").astype(np.float32)
        good = bool(np.isfinite(steps).all() and (steps > 0).all() and np.isfinite(axes.mean).all())
        require(good and bool(np.isfinite(axes.matrix).all()), PayloadError, f"{what} in steps that are none")
        transformed = tuple(cursor.take(cursor.take(1)[0]))
        require(
            all(i < d for i in transformed), PayloadError, f"{what} of {d} channels, and more transformed"
        )
        columns = np.stack([unzigzag(unpack_classes(cursor, counts)) for _ in range(d)])
        cursor.close()
        return cls(axes, steps, tuple(counts), columns, tuple(sorted(set(transformed))))


def pack_finer(coarse: Sequence[Numbers], fine: Sequence[Numbers]) -> bytes:
    """Return what leads from coarse numbers to the ``fine`` ones that they were made of, as bytes."""
    narrowed = [a.steps > b.steps for a, b in zip(coarse, fine, strict=True)]
    lists = [np.concatenate(narrowed).astype(np.uint8).tobytes()]
    for column in range(len(coarse[0].columns)):
        before = np.concatenate([numbers.columns[column] for numbers in coarse])
        apart = np.concatenate([numbers.columns[column] for numbers in fine]) - RATIO * before
        for which, counts in _contexts(coarse, narrowed, before):
            lists.append(pack_classes(zigzag(np.where(before < 0, -apart, apart)[which]), counts))
    return b"".join(lists)


def unpack_finer(data: bytes, coarse: Sequence[Numbers], what: str) -> list[Numbers]:
    """Return the fine numbers behind ``pack_finer``. Errors: ``PayloadError``."""
    cursor = ByteCursor(data, what)
    narrowed = [np.frombuffer(cursor.take(len(n.counts)), np.uint8) != 0 for n in coarse]
    classes = np.repeat(np.concatenate(narrowed), np.concatenate([n.counts for n in coarse]))
    columns = list[Ints]()
    for column in range(len(coarse[0].columns)):
        before = np.concatenate([numbers.columns[column] for numbers in coarse])
        found = np.where(classes, RATIO * before, before)
        for which, counts in _contexts(coarse, narrowed, before):
            apart = unzigzag(unpack_classes(cursor, counts))
            found[which] += np.where(before[which] < 0, -apart, apart)
        columns.append(found)
    cursor.close()
    ends = np.cumsum([numbers.columns.shape[1] for numbers in coarse])[:-1]
    parts = np.split(np.stack(columns), ends, axis=1)
    steps = [np.where(w, n.steps / RATIO, n.steps) for n, w in zip(coarse, narrowed, strict=True)]
    return [replace(n, steps=s, columns=p) for n, s, p in zip(coarse, steps, parts, strict=True)]


def _contexts(
    coarse: Sequence[Numbers], narrowed: Sequence[npt.NDArray[np.bool_]], before: Ints
) -> list[tuple[npt.NDArray[np.intp], list[int]]]:
    """Return which numbers of a column have one list, and how many of each class: zeros, then the others."""
    counts = np.concatenate([numbers.counts for numbers in coarse])
    classes, finer = np.repeat(np.arange(len(counts)), counts), np.repeat(np.concatenate(narrowed), counts)
    both = [np.flatnonzero(finer & zero) for zero in (before == 0, before != 0)]
    return [(at, np.bincount(classes[at], minlength=len(counts)).tolist()) for at in both]


def rounded(scaled: npt.NDArray[np.float32]) -> Ints:
    """Return whole numbers near those in steps."""
    levels = np.minimum(np.abs(scaled) + np.float32(ROUNDING), MOST).astype(np.int32)
    return np.where(scaled < 0, -levels, levels)


def _bits(numbers: Ints, scaled: npt.NDArray[np.float32], counts: Sequence[int]) -> float:
    """Return about the bits of numbers by class, and what an equal error would take more or less."""
    small = np.minimum(zigzag(numbers), ESCAPE)
    ends = np.cumsum(counts)[:-1]
    own = sum(entropy(np.bincount(part)) for part in np.split(small, ends) if len(part))
    error = max(float(np.mean((scaled - numbers) ** 2)), 1e-12)
    return own + len(numbers) / 2 * math.log2(error)


def _third(columns: Ints) -> Ints:
    """Return the nearest thirds of whole numbers."""
    third: Ints = np.sign(columns) * ((np.abs(columns) + 1) // RATIO)
    return third
