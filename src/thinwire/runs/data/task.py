"""What a run learns: how blocks of samples become what a model is given and what it is to answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from thinwire.types import InputError, require

UNLEARNT = -100  # a target without loss, as in PyTorch


def pack(tokens: Tensor, seq: int) -> Tensor:
    """Cut ``tokens`` [T] into blocks [N, seq + 1]; the row number is the sample id for the run.

    Packed once: the same words behind another prefix give other activations, so packing anew every epoch
    would leave no delta to send. Blocks overlap by one token, so that every token but the first is a target.
    A token that is not to be learnt is there as its complement; a block with no other target is left out.

    >>> pack(torch.tensor([0, 1, 2, 3, ~4, ~5, ~6, ~7, 8, 9]), 3).tolist()
    [[0, 1, 2, 3], [-7, -8, 8, 9]]
    """
    require(seq > 0, InputError, f"a block of {seq} tokens is empty; use a larger --seq")
    n = (len(tokens) - 1) // seq
    require(n > 0, InputError, f"data has {len(tokens)} tokens, one block needs {seq + 1}; use a longer text")
    blocks = tokens[: n * seq + 1].unfold(0, seq + 1, seq)  # a view: what is kept is the one copy
    kept = blocks[(blocks[:, 1:] >= 0).any(1)].to(torch.int64)
    require(len(kept) > 0, InputError, f"no block of {seq} tokens has one to learn; use longer texts")
    return kept


def inputs(blocks: Tensor) -> Tensor:
    """Return the token ids [B, L] that go into the model, of blocks [B, L + 1] as ``pack`` makes them.

    >>> inputs(torch.tensor([[~4, 5, 6]])).tolist()
    [[4, 5]]
    """
    tokens = blocks[:, :-1]
    return torch.where(tokens < 0, ~tokens, tokens)


def targets(blocks: Tensor) -> Tensor:
    """Return the token [B, L] to be predicted after each input; ``UNLEARNT`` for a prompt's.

    >>> targets(torch.tensor([[0, ~5, 6]])).tolist()
    [[-100, 6]]
    """
    tokens = blocks[:, 1:]
    return torch.where(tokens < 0, UNLEARNT, tokens)


@dataclass(frozen=True)
class Task:
    """Samples are the rows of one tensor: blocks [B, ``numbers``] of ``dtype``. Shapes are of one sample.

    The loss is the cross-entropy of the logits [B, ..., classes] over the targets [B, ...] that are to be
    learnt. ``hidden``: the shape of what crosses a stage boundary; empty for a model that is not cut.
    ``accuracy``: evaluations also say how many targets have the largest logit.
    """

    inputs: Callable[[Tensor], Tensor]
    targets: Callable[[Tensor], Tensor]
    numbers: int
    dtype: torch.dtype
    hidden: tuple[int, ...]
    logits: tuple[int, ...]
    accuracy: bool = False

    @property
    def values(self) -> int:
        """Values of a sample that cross each stage boundary."""
        return math.prod(self.hidden) if self.hidden else 0

    def blank(self, rows: int) -> Tensor:
        """Return a block of zeros, of which ``inputs`` and ``targets`` have the shapes of any other."""
        return torch.zeros(rows, self.numbers, dtype=self.dtype)


def language(seq: int, width: int, vocabulary: int) -> Task:
    """Return the task of predicting each next token, over blocks as ``pack`` makes them.

    >>> language(3, 8, 100).inputs(torch.tensor([[5, 6, 7, 8]])).tolist()
    [[5, 6, 7]]
    """
    return Task(inputs, targets, seq + 1, torch.int64, (seq, width), (seq, vocabulary))


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
        # Targets of the batch with the largest logit, counted where ``accuracy`` is asked for, on the device.
        self.right: int | Tensor = 0
        self.scale = 1.0
        self._accuracy = accuracy
        self._usual = 0.0  # targets in a micro-batch, on average

    def begin(self, targets: Tensor, microbatches: int, scale: float = 1.0) -> None:
        """Name the targets [B, L] of the coming batch, and what its losses are multiplied by."""
        self.right, self._usual, self.scale = 0, learnt(targets) / microbatches, scale

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self._accuracy:
            self.right = self.right + (logits.argmax(-1) == targets).sum()
        count = (targets != UNLEARNT).sum()  # a card keeps it: to read it here would be to wait
        share = (int(count) if count.device.type == "cpu" else count.float()) / self._usual
        return next_token_loss(logits, targets) * (share * self.scale)


def learnt(targets: Tensor) -> int:
    """Return how many targets are to be learnt."""
    return int((targets != UNLEARNT).sum())
