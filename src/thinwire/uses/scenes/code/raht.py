"""The region-adaptive Haar transform: values of neighbouring cells to a mean and differences, step by step.

Source: R. L. de Queiroz and P. A. Chou, IEEE Transactions on Image Processing 25 (2016). It keeps energy, and
follows from the positions alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.uses.scenes.code.morton import Codes

Values = npt.NDArray[np.float64]


class Merge(NamedTuple):
    """Pairs that one step joins: which are the left and right ones, and the factors of each."""

    left: npt.NDArray[np.intp]
    right: npt.NDArray[np.intp]
    a: Values
    b: Values


@dataclass(frozen=True, eq=False)
class HaarPlan:
    """The steps for cells in the order of the curve; ``root`` is where their common mean comes to be.

    >>> plan = HaarPlan.of(np.arange(4, dtype=np.uint64), 1)
    >>> plan.forward(np.ones((4, 1))).round(6)[:, 0].tolist()
    [2.0, 0.0, 0.0, 0.0]
    """

    merges: tuple[Merge, ...]
    root: int = 0

    @classmethod
    def of(cls, codes: Codes, depth: int) -> HaarPlan:
        """Return the plan for rising places on Morton's curve, no two alike."""
        weight, index, merges = np.ones(len(codes)), np.arange(len(codes)), list[Merge]()
        for _ in range(3 * depth):
            parent = codes >> np.uint64(1)
            left = np.flatnonzero(parent[1:] == parent[:-1])
            total = weight[left] + weight[left + 1]
            a, b = np.sqrt(weight[left] / total)[:, None], np.sqrt(weight[left + 1] / total)[:, None]
            merges.append(Merge(index[left], index[left + 1], a, b))
            weight[left] = total
            keep = np.ones(len(codes), bool)
            keep[left + 1] = False
            codes, weight, index = parent[keep], weight[keep], index[keep]
        return cls(tuple(merges))

    def forward(self, values: Values) -> Values:
        """Return the coefficients of values [n, channels]."""
        x = values.astype(np.float64)
        for left, right, a, b in self.merges:
            low, high = x[left], x[right]
            x[left], x[right] = a * low + b * high, a * high - b * low
        return x

    def inverse(self, coefficients: Values) -> Values:
        """Return the values of coefficients [n, channels]."""
        x = coefficients.astype(np.float64)
        for left, right, a, b in reversed(self.merges):
            low, high = x[left], x[right]
            x[left], x[right] = a * low - b * high, b * low + a * high
        return x
