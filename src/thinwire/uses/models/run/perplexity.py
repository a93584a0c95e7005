"""How well a model tells the next token of a text: the perplexity, in windows of their own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from thinwire.uses.models.run.layers import told


def losses(model: Any, ids: Tensor) -> Tensor:
    """Return the mean loss [windows] in nats of tokens [windows, tokens], each window by itself."""
    found = list[Tensor]()
    with torch.no_grad():
        for window in ids:
            parts = told(model, window, [])
            own = [torch.nn.functional.cross_entropy(*part, reduction="sum") for part in parts]
            found.append(torch.stack(own).sum() / (len(window) - 1))
    return torch.stack(found)


def perplexity(model: Any, ids: Tensor) -> float:
    """Return the perplexity of tokens [windows, tokens].

    >>> class Even(torch.nn.Module):
    ...     def forward(self, input_ids, use_cache):
    ...         return type("Out", (), {"logits": torch.zeros(1, input_ids.shape[1], 8)})
    >>> round(perplexity(Even(), torch.zeros(2, 5, dtype=torch.long)), 6)
    8.0
    """
    return math.exp(min(float(losses(model, ids).mean()), 700.0))
