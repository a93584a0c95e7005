"""What calibration saw of a matrix, and rounding by it: each column's error is made good in those to come."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.types import PayloadError, require


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

    def to(self, device: torch.device) -> Moments:
        """Return them on a device."""
        return Moments(self.rows.to(device), self.columns.to(device))

    @classmethod
    def flat(cls, rows: int, columns: int, mean: float = 1.0) -> Moments:
        """Return moments of which nothing is known but how much a weight matters on average."""
        return cls(torch.full((rows,), 1 / max(rows, 1)), torch.full((columns,), rows * mean))


MOST = 32_767  # of a code, and -32,767 at least: single weights are far out, and clipping those ruins a model
HOLD = 0.75  # of a step: how far off a code may be before it moves, where earlier codes are kept
BLOCK = 64  # columns whose errors are passed on together
DAMPING = 0.01  # of the mean of the diagonal
TRIES = 6  # at more and more damping
PIECE = 1 << 22  # weights that are at work at a time: rows do not depend on each other
NOTHING = 1e-30  # of moments: a layer before it gives zeros; squares of the factor are numbers still


def inverse_factor(columns: Tensor) -> Tensor:
    """Return the upper factor U of H^-1 = U^T U for second moments H [columns, columns], damped.

    ``U[j, j] ** -2`` is what an error of 1 in column j costs once the columns after it have made it good.

    >>> inverse_factor(4 * torch.eye(2)).diagonal().round(decimals=2).tolist()
    [0.5, 0.5]
    """
    n = len(columns)
    mean = columns.diagonal().mean().clamp(min=NOTHING)
    eye = torch.eye(n, dtype=columns.dtype, device=columns.device)
    for i in range(TRIES):
        damped = columns / mean + DAMPING * 4**i * eye
        # Turned about, so that one factor and its inverse are all: H = M M^T with M upper, and U = M^-1.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            upper = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
            return upper / mean.sqrt()
    require(False, PayloadError, "moments that no damping makes positive: they hold a NaN or an infinity")
    raise AssertionError


def quantised(
    x: Tensor,
    steps: Tensor,
    upper: Tensor | None = None,
    kept: Tensor | None = None,
    bounds: tuple[int, int] = (-MOST, MOST),
) -> Tensor:
    """Return int16 codes [rows, columns] of a matrix with ``steps`` [columns] or [rows, columns].

    With ``upper``, from ``inverse_factor``, errors are fed forward; without, each weight is rounded alone.
    ``kept`` [rows, columns], where given, are earlier codes: one stays while it is not too far off.
    """
    codes = torch.empty(x.shape, dtype=torch.int16, device=x.device)
    for own in pieces_of(x):
        by_row = steps if steps.ndim == 1 else steps[own]
        codes[own] = _quantised(x[own], by_row, upper, None if kept is None else kept[own], bounds)
    return codes


def pieces_of(x: Tensor) -> list[slice]:
    """Return the rows of a matrix [rows, columns] in pieces of ``PIECE`` weights, or one row each.

    >>> pieces_of(torch.empty(3, PIECE // 2 + 1))
    [slice(0, 1, None), slice(1, 2, None), slice(2, 3, None)]
    """
    each = max(1, PIECE // max(x.shape[1], 1))
    return [slice(start, min(start + each, len(x))) for start in range(0, len(x), each)]


def _quantised(
    x: Tensor, steps: Tensor, upper: Tensor | None, kept: Tensor | None, bounds: tuple[int, int]
) -> Tensor:
    if upper is None and kept is None:
        return (x / steps).round_().clamp_(*bounds).to(torch.int16)
    left = x.t().contiguous()  # a column is a row here: it lies in one piece
    by_column = steps if steps.ndim == 1 else steps.t().contiguous()
    old = None if kept is None else kept.t().contiguous()
    codes = torch.empty(left.shape, dtype=torch.int16, device=x.device)
    for start in range(0, len(left), BLOCK):
        stop = min(start + BLOCK, len(left))
        errors = torch.empty(stop - start, left.shape[1], device=x.device)
        for j in range(start, stop):
            code = _nearest(left[j] / by_column[j], None if old is None else old[j]).clamp_(*bounds)
            codes[j] = code
            error = left[j].sub_(code.mul_(by_column[j]))
            if upper is not None:
                error.div_(upper[j, j])
                left[j + 1 : stop].addr_(upper[j, j + 1 : stop], error, alpha=-1)
            errors[j - start] = error
        if upper is not None:
            left[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
    return codes.t().contiguous()


def _nearest(wanted: Tensor, old: Tensor | None) -> Tensor:
    """Return the nearest whole numbers, or the old ones where these are within ``HOLD``."""
    if old is None:
        return wanted.round_()
    was = old.to(wanted.dtype)
    return torch.where((wanted - was).abs() <= HOLD, was, wanted.round())
