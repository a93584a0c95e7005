"""The training loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

from thinwire.runs.data.packing import UNLEARNT


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats a token over the targets that are to be learnt.

    ``logits`` [B, L, V], ``targets`` [B, L] already shifted by one; or [B, V] and [B], of a class a sample.
    Computed in float32 whatever the dtype of the logits: bfloat16 has too few bits for a sum over the
    vocabulary.

    >>> import torch
    >>> next_token_loss(torch.zeros(1, 3, 4), torch.tensor([[0, 3, UNLEARNT]]))
    tensor(1.3863)
    """
    return cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=UNLEARNT)


class BatchLoss:
    """The loss of micro-batches by their share of a batch's targets.

    Where prompts leave micro-batches unequally much to learn, the mean of their own means would count a token
    for more the fewer there are beside it. The mean of these is the mean over the batch.

    >>> import torch
    >>> targets = torch.tensor([[0, 1], [2, UNLEARNT]])
    >>> logits = torch.eye(4)[torch.tensor([[0, 1], [0, 0]])]
    >>> of_micro_batch = BatchLoss()
    >>> of_micro_batch.begin(targets, 2)
    >>> parts = [of_micro_batch(logits[k : k + 1], targets[k : k + 1]) for k in range(2)]
    >>> torch.allclose(sum(parts) / 2, next_token_loss(logits, targets))
    True
    """

    def __init__(self, accuracy: bool = False) -> None:
        self.right = 0  # targets of the batch with the largest logit; counted where ``accuracy`` is asked for
        self._accuracy = accuracy
        self._usual = 0.0  # targets in a micro-batch, on average

    def begin(self, targets: Tensor, microbatches: int) -> None:
        """Name the targets [B, L] of the coming batch."""
        self.right, self._usual = 0, learnt(targets) / microbatches

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self._accuracy:
            self.right += int((logits.argmax(-1) == targets).sum())
        return next_token_loss(logits, targets) * (learnt(targets) / self._usual)


def learnt(targets: Tensor) -> int:
    """Return how many targets are to be learnt."""
    return int((targets != UNLEARNT).sum())
