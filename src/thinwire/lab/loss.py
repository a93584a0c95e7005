"""The training loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats a token.

    ``logits`` [B, L, V], ``targets`` [B, L] already shifted by one. Computed in float32 whatever the dtype of
    the logits: bfloat16 has too few bits for a sum over the vocabulary.

    >>> import torch
    >>> next_token_loss(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]))
    tensor(1.3863)
    """
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())
