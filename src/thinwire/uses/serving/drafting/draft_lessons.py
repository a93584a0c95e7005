"""What a draft head learns from: a model's hidden states, and the head's own behind them.

While text is made the head goes on from its own states. So it is taught that way: it takes several steps
from each position, and each is compared with what the model says there (EAGLE-3, Li et al., arXiv
2503.01840, section 3.2: training-time test).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.uses.serving.drafting.draft_head import DraftHead

STEPS = 4  # that a head takes from each position
FADE = 0.8  # the weight of a step, of the one before
FAR = -30_000.0  # a score that attention does not see


@dataclass(frozen=True)
class DraftLesson:
    """Texts: ``tokens`` [B, L] int64 and the model's last hidden states [B, L, D] behind each of them."""

    tokens: Tensor
    states: Tensor


def lesson_loss(head: DraftHead, lesson: DraftLesson, steps: int = STEPS) -> Tensor:
    """Return the loss of a head over texts: the cross-entropy to the model's distribution, by steps."""
    expected = _expected(head, lesson)
    total, weights = expected.new_zeros(()), [FADE**j for j in range(steps)]
    for j, state in enumerate(unrolled(head, lesson, steps)):
        own = state[:, j:]
        # Of scores s and a distribution p, logsumexp(s) - p s; and p s = (p rows) state is known beforehand.
        loss = torch.logsumexp(head.scores(own).float(), -1) - (own.float() * expected[:, j:]).sum(-1)
        total = total + weights[j] * loss.mean()
    return total / sum(weights)


def agreement(head: DraftHead, lesson: DraftLesson, steps: int = STEPS) -> list[float]:
    """Return the share of tokens where a head's likeliest is the model's, by how many steps it took alone."""
    with torch.no_grad():
        said = head.scores(lesson.states[:, 1:-1].to(head.rows.dtype)).argmax(-1)
        states = unrolled(head, lesson, steps)
        return [
            float((head.scores(s[:, j:]).argmax(-1) == said[:, j:]).float().mean())
            for j, s in enumerate(states)
        ]


def unrolled(head: DraftHead, lesson: DraftLesson, steps: int) -> Iterator[Tensor]:
    """Yield a head's states [B, L - 2, D] after each step; those before the j-th position had fewer.

    At step j and position t the head has states of its own for the last j - 1 positions, and the model's
    for all before.
    """
    own = head.joined.weight.dtype
    tokens, states = lesson.tokens[:, 1:-1].to(head.rows.device), lesson.states[:, :-2]
    states = states.to(head.rows.device, own)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    rows, keys = head.embed(tokens), list[tuple[Tensor, Tensor]]()
    for _ in range(steps):
        x = head.mixed(states, rows)
        q, k, v = head.asked(x, positions)
        keys.append((k, v))
        state = head.finished(x, _attended(q, keys, head.shape.window))
        yield state
        states = torch.cat((states[:, :1], state[:, :-1]), 1)  # the one at t is of the step before, at t - 1


def _expected(head: DraftHead, lesson: DraftLesson) -> Tensor:
    """Return the mean row [B, L - 2, D] of the common tokens, by the model's distribution over them."""
    with torch.no_grad():
        said = lesson.states[:, 1:-1].to(head.rows.device, head.rows.dtype)
        mean: Tensor = head.scores(said).float().softmax(-1).to(said.dtype) @ head.rows
        return mean.float()


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
