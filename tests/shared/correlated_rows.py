"""Rows of which all numbers follow from a few, and their components."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.caches.components import BOTH, Basis, fitted, weight_of


def correlated(tokens: int, heads: int = 2, width: int = 8) -> list[Tensor]:
    """Return keys and values of two layers whose numbers all follow from a few."""
    draw = torch.Generator().manual_seed(1)
    few = torch.randn(tokens, 6, generator=draw)
    mixing = torch.randn(4, heads, 6, width, generator=draw)
    noise = 0.05 * torch.randn(4, heads, tokens, width, generator=draw)
    return [*(few @ mixing + noise)]


def basis_of(held: list[Tensor]) -> Basis:
    """Return the components of such, by unequal weights."""
    rows = torch.cat([x.transpose(0, 1).flatten(1) for x in held], 1).double()
    mean, draw = rows.mean(0), torch.Generator().manual_seed(2)
    weights = []
    for x in held:
        root = torch.randn(x.shape[0], x.shape[2], x.shape[2], generator=draw)
        weights.append(weight_of(root @ root.transpose(1, 2)))
    covariance = (rows - mean).T @ (rows - mean) / len(rows)
    return fitted((0, 1), BOTH, mean, covariance, weights, 1e-6)
