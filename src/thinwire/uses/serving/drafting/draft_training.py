"""Teach a draft head: what it begins with, and a schedule of steps over lessons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from thinwire.uses.serving.drafting.draft_head import DraftHead
from thinwire.uses.serving.drafting.draft_lessons import DraftLesson, lesson_loss

RATE = 1.5e-3
WARM = 0.05  # share of the steps in which the rate rises
LAST = 0.02  # share of the rate at the end
SMALL = 0.3  # of the usual random weights: at first the head hands on the state that it gets


def common_tokens(texts: Iterable[Tensor], vocabulary: int, many: int) -> Tensor:
    """Return the ``many`` commonest tokens of texts, sorted.

    >>> common_tokens([torch.tensor([5, 1, 5, 3, 3, 5])], 8, 2)
    tensor([3, 5])
    """
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for tokens in texts:
        counts += torch.bincount(tokens.flatten(), minlength=vocabulary)
    return counts.topk(min(many, vocabulary)).indices.sort().values


def begin(head: DraftHead, states: Tensor) -> None:
    """Set a head's first weights, in place: it hands on the hidden states [..., D] that it gets."""
    width = head.shape.width
    with torch.no_grad():
        head.joined.weight[:, :width] = torch.eye(width)
        head.joined.weight[:, width:].mul_(SMALL)
        for part in (head.attended, head.narrowed):
            part.weight.mul_(SMALL)
        head.out.weight.fill_(float(states.float().pow(2).mean().sqrt()))


def train_head(
    head: DraftHead,
    next_lesson: Callable[[], DraftLesson],
    steps: int,
    *,
    rate: float = RATE,
    told: Callable[[int], object] = lambda step: None,
) -> None:
    """Teach a head by ``steps`` lessons, in place; ``told`` hears of each.

    AdamW with a warm-up and a cosine; matrix products in bf16.
    """
    optimiser = torch.optim.AdamW(head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    device = head.joined.weight.device.type
    head.train()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * _share(step, steps)
        with torch.autocast(device, torch.bfloat16):
            loss = lesson_loss(head, next_lesson())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
        told(step + 1)
    head.eval()


def _share(step: int, steps: int) -> float:
    rising = min(1.0, (step + 1) / max(1.0, WARM * steps))
    return rising * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * step / max(1, steps))))
