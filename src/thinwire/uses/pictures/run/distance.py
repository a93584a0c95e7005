"""How far one set of garments is from another: Fréchet's distance between features of our own classifier.

It is not FID: that one is of another network, on other pictures. Read it beside the distance of real garments
from real ones, on as many of them: a distance of few pictures is too large.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.types import InputError, require
from thinwire.uses.pictures.run.classifier import load_classifier, seen


def features(garments: Tensor) -> Tensor:
    """Return what the classifier's last layer takes, float64 [N, 256], for garments [N, 32, 32] in 0..1."""
    *before, _ = load_classifier().children()
    with torch.no_grad():
        found = seen(garments)
        for layer in before:
            found = layer(found)
    return found.double()


def garment_distance(garments: Tensor, others: Tensor) -> float:
    """Return the distance between garments [N, 32, 32] and [M, 32, 32] in 0..1, at least 0.

    Errors: ``InputError`` for fewer than two garments, of which there is no covariance.
    """
    few = min(len(garments), len(others))
    require(few >= 2, InputError, f"a set of {few} garments has no distance; give two garments at least")
    return frechet(features(garments), features(others))


def frechet(a: Tensor, b: Tensor) -> float:
    """Return the squared Fréchet distance between normal distributions fitted to rows [N, d] and [M, d].

    It is |m - n|^2 + tr(A + B - 2 (A B)^(1/2)), for means m, n and covariances A, B (Dowson and Landau 1982,
    equation 16 [memory]).

    >>> rows = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 5.0]])
    >>> round(frechet(rows, rows + torch.tensor([3.0, 4.0])), 9)
    25.0
    """
    a, b = a.double(), b.double()
    cov_a, cov_b = (torch.cov(x.T).view(x.shape[1], -1) for x in (a, b))
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    between = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    apart = (a.mean(0) - b.mean(0)).square().sum()
    return max(0.0, float(apart + cov_a.trace() + cov_b.trace() - 2 * between))
