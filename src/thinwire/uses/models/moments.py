"""What calibration saw of a matrix: how much an error of each row and column costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Moments:
    """The curvature of the loss in a matrix [rows, columns]: a part of the rows times one of the columns.

    The matrix is the one that is coded: divided by 2 ** ``power_of`` it.
    An error E costs half the sum over rows i of ``rows[i]`` E[i] ``columns`` E[i]^T, in nats a token.
    ``rows`` [rows]: shares, their sum is 1. ``columns`` [columns, columns]: second moments of the inputs,
    each token weighted by its squared gradient; [columns], their diagonal, where no more is known.
    Source: the Kronecker factors of K-FAC (arXiv 1503.05671), of which that of the outputs is cut to its
    diagonal.
    """

    rows: Tensor
    columns: Tensor

    @property
    def mean(self) -> float:
        """Mean curvature of a weight, in nats a token for an error of 1 in it alone."""
        own = self.columns if self.columns.ndim == 1 else self.columns.diagonal()
        return float(own.double().mean()) / max(len(self.rows), 1)

    def plus(self, other: Moments) -> Moments:
        """Return the moments of a matrix that is used in both ways, such as a tied embedding.

        >>> one = Moments(torch.tensor([1.0, 0.0]), torch.eye(2))
        >>> one.plus(Moments(torch.tensor([0.0, 1.0]), 3 * torch.eye(2))).rows.tolist()
        [0.25, 0.75]
        """
        own, its = self.columns.trace(), other.columns.trace()
        both = (own + its).clamp(min=torch.finfo(torch.float32).tiny)
        return Moments((self.rows * own + other.rows * its) / both, self.columns + other.columns)

    @classmethod
    def flat(cls, rows: int, columns: int, mean: float = 1.0) -> Moments:
        """Return moments of which nothing is known but how much a weight matters on average."""
        return cls(torch.full((rows,), 1 / max(rows, 1)), torch.full((columns,), rows * mean))
