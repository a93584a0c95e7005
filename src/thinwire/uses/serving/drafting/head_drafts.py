"""A draft head at work, beside the last stage: it proposes tokens for many texts together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.uses.serving.drafting.draft_head import DraftHead, DraftPast
from thinwire.uses.serving.token_picking import Picking


class AskedDrafts(NamedTuple):
    """A text of which more tokens are known: hidden ``states`` [m, D] from position ``at`` on.

    ``tokens``: the one behind each of them; ``many`` are to be proposed behind the last.
    """

    request: int
    at: int
    states: Tensor
    tokens: Sequence[int]
    many: int
    picking: Picking


@dataclass
class _Held:
    """A text that the head knows: the end of its prompt, states of that, and the past behind it."""

    tail: tuple[int, ...] = ()
    tail_at: int = 0
    at: int = 0  # position of the first of ``states``
    states: list[Tensor] = field(default_factory=list)
    past: DraftPast | None = None


class HeadDrafts:
    """Propose by a head that is bound to its model. It keeps what it looks back over, for each text."""

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self._held: dict[int, _Held] = {}

    def begin(self, request: int, tail: Sequence[int], tail_at: int) -> None:
        """Hear of a text: the last tokens of its prompt, and the position of the first of these."""
        self._held[request] = _Held(tuple(tail), tail_at)

    def __contains__(self, request: int) -> bool:
        return request in self._held

    def forget(self, request: int) -> None:
        """Hear that a text is over."""
        self._held.pop(request, None)

    def pass_by(self, request: int, at: int, states: Tensor) -> None:
        """Keep hidden states [m, D] of a prompt from position ``at`` on, as far as the head looks back."""
        held = self._held[request]
        skip = max(0, held.tail_at - 1 - at)
        if skip < len(states):
            if not held.states:
                held.at = at + skip
            held.states.append(states[skip:])

    def ask(
        self, request: int, at: int, states: Tensor, tokens: Sequence[int], many: int, how: Picking
    ) -> AskedDrafts:
        """Return what is asked of the head behind ``tokens``, given the states [m, D] before each of them.

        The end of the prompt, where it has only passed by, stands before them.
        """
        held = self._held[request]
        before, held.states = held.states, []
        if before:
            tail = held.tail[held.at + 1 - held.tail_at : at + 1 - held.tail_at]
            states, tokens, at = torch.cat((*before, states)), [*tail, *tokens], held.at
        return AskedDrafts(request, at, states, tokens, many, how)

    def draft(self, asked: Sequence[AskedDrafts]) -> list[list[int]]:
        """Return what is proposed for each text, all of them in one pass a token."""
        head, most = self.head, max(a.many for a in asked)
        with torch.inference_mode():
            state, past = self._caught_up(asked)
            found: list[list[int]] = [[] for _ in asked]
            at = torch.tensor([a.at + len(a.tokens) for a in asked], device=state.device)
            for j in range(most):
                scores = head.scores(state[:, -1]).float()
                for row, a, own in zip(scores, asked, found, strict=True):
                    if j < a.many:
                        own.append(
                            a.picking.pick(row, a.at + len(a.tokens) + j, head.common, len(head.table))
                        )
                if j + 1 < most:
                    newest = torch.tensor([own[-1:] or [0] for own in found], device=state.device)
                    state, past = head(state[:, -1:], newest, at[:, None] + j, past)
        return found

    def _caught_up(self, asked: Sequence[AskedDrafts]) -> tuple[Tensor, DraftPast]:
        """Take in what is known now; return the last states [N, 1, D], and the past."""
        head, longest = self.head, max(len(a.tokens) for a in asked)
        own = head.joined.weight
        states = own.new_zeros(len(asked), longest, head.shape.width)
        tokens = torch.zeros(len(asked), longest, dtype=torch.int64)
        positions = torch.full((len(asked), longest), -1)
        for i, a in enumerate(asked):  # each ends with its newest one
            n = len(a.tokens)
            states[i, longest - n :] = a.states.to(own.device, own.dtype)
            tokens[i, longest - n :] = torch.tensor(a.tokens)
            positions[i, longest - n :] = torch.arange(a.at, a.at + n)
        state, past = head(states, tokens, positions.to(own.device), self._past(asked))
        for i, a in enumerate(asked):
            self._held[a.request].past = past.kept(i, head.shape.window - 1)
        return state[:, -1:], past

    def _past(self, asked: Sequence[AskedDrafts]) -> DraftPast:
        """Return the pasts of texts, side by side."""
        pasts = [self._held[a.request].past or self.head.empty(1) for a in asked]
        most = max(p.positions.shape[1] for p in pasts)
        return DraftPast.beside([p.padded(most) for p in pasts])
