"""A crowd that trains a tiny model together, some of it honest: which word follows which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from thinwire.codecs import DeadZone, roundtrip
from thinwire.codecs.deadzone import step_for
from thinwire.rounds.judging import Candidate, Judgement

WORDS, BLOCK, BATCH = 48, 24, 4
CODEC = DeadZone(step_for(2.4))


class Text:
    """Words by chance, each after the one before it by the same table."""

    def __init__(self, seed: int) -> None:
        self._draw = torch.Generator().manual_seed(seed)
        self._table = torch.softmax(1.5 * torch.randn(WORDS, WORDS, generator=self._draw), 1)

    def blocks(self, many: int) -> Tensor:
        """Return blocks [many, BLOCK + 1]."""
        words = [torch.randint(0, WORDS, (many,), generator=self._draw)]
        for _ in range(BLOCK):
            words.append(torch.multinomial(self._table[words[-1]], 1, generator=self._draw)[:, 0])
        return torch.stack(words, 1)


def block_losses(row: Tensor, blocks: Tensor) -> Tensor:
    """Return the loss of each block, in nats a word: a row of the weights is what follows a word."""
    logits = row.view(WORDS, WORDS)[blocks[:, :-1]]
    losses = cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten(), reduction="none")
    return losses.view(len(blocks), -1).mean(1)


def trained(row: Tensor, blocks: Tensor, rate: float) -> Tensor:
    """Return what Adam takes off ``row``, a batch of ``blocks`` a step; its moments begin anew."""
    at = blocks[:, :-1] * WORDS + blocks[:, 1:]
    start, mean, square = row, torch.zeros_like(row), torch.zeros_like(row)
    for step, batch in enumerate(at.split(BATCH), 1):
        seen = torch.bincount(batch.flatten(), minlength=WORDS * WORDS).view(WORDS, WORDS)
        guess = seen.sum(1, keepdim=True) * torch.softmax(row.view(WORDS, WORDS), 1)
        slope = ((guess - seen) / batch.numel()).view(1, -1)
        mean, square = mean.lerp(slope, 0.1), square.lerp(slope.square(), 0.001)
        row = row - rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
    return start - row


Lie = Callable[["Crowd", int, Tensor], Tensor]


class Crowd:
    """Members in rounds under a judge; ``lies``: what a member makes of its own honest update.

    ``steps``: local steps of each member, which says how many there are. ``own``: each has data of its own.
    """

    def __init__(
        self,
        seed: int,
        steps: list[int],
        lies: Mapping[int, Lie] | None = None,
        own: int = 0,
        rate: float = 0.03,
        heldout: int = 64,
    ) -> None:
        self.steps, self.lies, self.rate = steps, dict(lies or {}), rate
        self.text, self.draw = Text(seed), torch.Generator().manual_seed(seed)
        self.heldout = self.text.blocks(heldout)
        self.mine = [self.text.blocks(own) for _ in steps] if own else None
        self.given: dict[int, Tensor] = {}
        self.row, self.version = torch.zeros(1, WORDS * WORDS), 0
        self.residuals = [torch.zeros_like(self.row) for _ in steps]
        self.honest: list[Tensor] = []  # updates of this round, before any lie
        self.before: dict[int, list[Tensor]] = {}

    def assigned(self, client: int) -> Tensor | None:
        return None if self.mine else self.given[client]

    def round(self, judge: Any, who: list[int] | None = None) -> dict[int, Judgement]:
        """Train, lie, judge, and make a version; return the verdicts."""
        who = list(range(len(self.steps))) if who is None else who
        self.honest = [torch.zeros_like(self.row)] * len(self.steps)
        for c in who:
            need = self.steps[c] * BATCH
            if self.mine:
                blocks = self.mine[c][torch.randint(0, len(self.mine[c]), (need,), generator=self.draw)]
            else:
                blocks = self.given[c] = self.text.blocks(need)
            change = trained(self.row, blocks, self.rate) + self.residuals[c]
            self.honest[c] = CODEC.decode(roundtrip(CODEC, change)[0])
            self.residuals[c] = change - self.honest[c]
        sent = {c: self.lies[c](self, c, self.honest[c]) if c in self.lies else self.honest[c] for c in who}
        found = [Candidate(c, row, self.steps[c] * BATCH) for c, row in sent.items()]
        verdicts = judge.weigh(self.version, self.row, found)
        trust = {k.client: k.samples * verdicts.get(k.client, Judgement()).trust for k in found}
        for c, row in sent.items():
            self.before.setdefault(c, []).append(row)
        if total := sum(trust.values()):
            self.row = self.row - sum(row * (trust[c] / total) for c, row in sent.items())
        self.version += 1
        return verdicts

    def loss(self) -> float:
        return float(block_losses(self.row, self.heldout).mean())

    def noise(self, like: Tensor, share: float = 1.0) -> Tensor:
        found = torch.randn(like.shape, generator=self.draw)
        return found * (share * like.norm() / found.norm())
