"""Blocks of tokens, packed once: what goes into a model, and what it is to predict."""

from __future__ import annotations

import torch
from torch import Tensor

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
