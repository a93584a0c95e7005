"""What tiny random transformers of diffusers, and their inputs, are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]
Host = tuple[Callable[[], nn.Module], Callable[[], Inputs]]


def made(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return what makes a transformer of diffusers: random, and with no parameter left at nought."""

    def make() -> nn.Module:
        import diffusers

        torch.manual_seed(9)
        model: Any = getattr(diffusers, name)(**sizes)
        for p in model.parameters():
            p.data = torch.randn_like(p) * (0.8 * p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3)
        return model.eval()  # type: ignore[no-any-return]

    return make


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """Return random values of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def padded(tokens: int, *lengths: int) -> Tensor:
    """Return masks [B, tokens] of 0 and 1 for texts of these lengths.

    >>> padded(3, 3, 1).tolist()
    [[1, 1, 1], [1, 0, 0]]
    """
    return (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()
