"""What a draft head learns from: a model's hidden states, and the head's own behind them.

While text is made the head goes on from its own states. So it is taught that way: it takes several steps
from each position, and each is compared with what the model says there (EAGLE-3, Li et al., arXiv
2503.01840, section 3.2: training-time test).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.uses.serving.drafting.draft_head import DraftHead

STEPS = 4  # that a head takes from each position
FADE = 0.8  # the weight of a step, of the one before
FAR = -30_000.0  # a score that attention does not see


@dataclass(frozen=True)
class Lesson:
    """Texts: ``tokens`` [B, L] int64 and the model's last hidden states [B, L, D] behind each of them."""

    tokens: Tensor
    states: Tensor


@dataclass(frozen=True)
class Heard:
    """Of one step of a head: its loss, and the share of tokens where its likeliest is the model's."""

    loss: Tensor
    right: Tensor


def lesson_loss(head: DraftHead, lesson: Lesson, steps: int = STEPS) -> tuple[Tensor, list[Heard]]:
    """Return the loss of a head over texts, and what each step of it gave.

    At step j and position t the head has states of its own for the last j - 1 positions, and the model's
    for all before. The loss is the cross-entropy to the model's distribution over the common tokens.
    """
    own = head.joined.weight.dtype
    tokens, states = lesson.tokens[:, 1:-1], lesson.states[:, :-2].to(own)
    said = lesson.states[:, 1:-1].to(own)  # what a right state would be, one token further on
    target = head.scores(said).float().log_softmax(-1).exp()
    likeliest = target.argmax(-1)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    rows, found, keys = head.embed(tokens), list[Heard](), list[tuple[Tensor, Tensor]]()
    for j in range(steps):
        q, k, v = head.asked(x := head.mixed(states, rows), positions)
        keys.append((k, v))
        state = head.finished(x, _attended(q, keys, head.shape.window))
        scores = head.scores(state[:, j:]).float()
        loss = F.cross_entropy(scores.flatten(0, 1), target[:, j:].flatten(0, 1))
        right = (scores.argmax(-1) == likeliest[:, j:]).float().mean()
        found.append(Heard(loss, right.detach()))
        states = torch.cat(
            (states[:, :1], state[:, :-1]), 1
        )  # the state at t is of the step before, at t - 1
    weights = [FADE**j for j in range(steps)]
    total = sum((w * h.loss for w, h in zip(weights, found, strict=True)), torch.zeros(())) / sum(weights)
    return total, found


def _attended(q: Tensor, keys: list[tuple[Tensor, Tensor]], window: int) -> Tensor:
    """Return what queries [B, H, n, w] of the newest step see.

    Of the first step's keys those of positions at least as far back as steps were taken since; of each later
    step the one on the way from there to here.
    """
    (k0, v0), later = keys[0], keys[1:]
    n, scale = q.shape[2], q.shape[3] ** -0.5
    apart = torch.arange(n, device=q.device)[:, None] - torch.arange(n, device=q.device)
    unseen = (apart < len(later)) | (apart >= window)
    scores = (q @ k0.transpose(-1, -2) * scale).float().masked_fill(unseen, FAR)
    behind = [len(later) - 1 - i for i in range(len(later))]  # how many positions back each later step is
    own = [
        (q * _moved(k, back)).sum(-1, keepdim=True) * scale
        for (k, _), back in zip(later, behind, strict=True)
    ]
    weights = torch.cat((scores, *(s.float() for s in own)), -1).softmax(-1).to(q.dtype)
    found = weights[..., :n] @ v0
    for i, ((_, v), back) in enumerate(zip(later, behind, strict=True)):
        found = found + weights[..., n + i : n + i + 1] * _moved(v, back)
    return found


def _moved(x: Tensor, back: int) -> Tensor:
    """Return x [B, H, n, w] in which each position has what is ``back`` positions before it."""
    return x if back == 0 else F.pad(x, (0, 0, back, 0))[:, :, : x.shape[2]]
