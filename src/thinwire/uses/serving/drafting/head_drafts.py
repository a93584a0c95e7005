"""A draft head at work, beside the last stage: it proposes tokens for many texts together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.uses.serving.choosing.draft_tree import DraftTree, depths
from thinwire.uses.serving.drafting.draft_head import DraftHead, DraftPast
from thinwire.uses.serving.token_picking import Picking


class AskedDrafts(NamedTuple):
    """A text of which more tokens are known: hidden ``states`` [m, D] from position ``at`` on.

    ``tokens``: the one behind each of them; a ``tree`` of more is to be proposed behind the last.
    """

    request: int
    at: int
    states: Tensor
    tokens: Sequence[int]
    tree: DraftTree
    picking: Picking


@dataclass
class _Held:
    """A text that the head knows: the end of its prompt, states of that, and the past behind it."""

    tail: tuple[int, ...] = ()
    tail_at: int = 0
    at: int = 0  # position of the first of ``states``
    states: list[Tensor] = field(default_factory=list)
    past: DraftPast | None = None


class GrownTree:
    """A tree of drafts of one text as it grows: tokens and states by node, -1 for what is known.

    ``slots``: where in the past the nodes stand that have children.
    """

    def __init__(self, asked: AskedDrafts, state: Tensor) -> None:
        self.asked = asked
        self.base = asked.at + len(asked.tokens)  # position of the last token that is known
        self.states, self.tokens = {-1: state}, dict[int, int]()
        self.slots = dict[int, int]()
        self._depths = depths(asked.tree.parents)
        self.depth = asked.tree.depth

    def parents_at(self, depth: int) -> list[int]:
        """Return the nodes that have children of a depth."""
        pairs = zip(self.asked.tree.parents, self._depths, strict=True)
        return sorted({parent for parent, own in pairs if own == depth})

    def name(self, parent: int, scores: Tensor, depth: int, head: DraftHead) -> None:
        """Give the children of a node their tokens, by scores [C] of the common ones."""
        tree, asked = self.asked.tree, self.asked
        own = {i: tree.ranks[i] for i, p in enumerate(tree.parents) if p == parent}
        many = 1 + max(own.values())
        found = asked.picking.ranked(scores, self.base + depth, many, head.common, len(head.table))
        self.tokens |= {i: found[min(rank, len(found) - 1)] for i, rank in own.items()}

    def way(self, node: int) -> list[int]:
        """Return the slots of a node and of those before it on its way."""
        found = list[int]()
        while node >= 0:
            found.append(self.slots[node])
            node = self.asked.tree.parents[node]
        return found


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
        self, request: int, at: int, states: Tensor, tokens: Sequence[int], tree: DraftTree, how: Picking
    ) -> AskedDrafts:
        """Return what is asked of the head behind ``tokens``, given the states [m, D] before each of them.

        The end of the prompt, where it has only passed by, stands before them.
        """
        held = self._held[request]
        before, held.states = held.states, []
        if before:
            tail = held.tail[held.at + 1 - held.tail_at : at + 1 - held.tail_at]
            states, tokens, at = torch.cat((*before, states)), [*tail, *tokens], held.at
        return AskedDrafts(request, at, states, tokens, tree, how)

    def draft(self, asked: Sequence[AskedDrafts]) -> list[list[int]]:
        """Return what is proposed for each text, node by node of its tree; those of a depth in one pass."""
        with torch.inference_mode():
            state, past = self._caught_up(asked)
            known = past.positions.shape[1]
            grown = [GrownTree(a, state[i, -1]) for i, a in enumerate(asked)]
            for depth in range(1, 1 + max(g.depth for g in grown)):
                self._name(grown, depth)
                past = self._deepen(grown, depth, past, known)
        return [[g.tokens[node] for node in range(len(g.asked.tree.parents))] for g in grown]

    def _name(self, grown: Sequence[GrownTree], depth: int) -> None:
        """Give the nodes of a depth their tokens, by the states of their parents."""
        parents = [(g, parent) for g in grown for parent in g.parents_at(depth)]
        if parents:
            scores = self.head.scores(torch.stack([g.states[parent] for g, parent in parents])).float()
            for row, (g, parent) in zip(scores, parents, strict=True):
                g.name(parent, row, depth, self.head)

    def _deepen(self, grown: Sequence[GrownTree], depth: int, past: DraftPast, known: int) -> DraftPast:
        """Make the states of those nodes of a depth that have children; return the past with them.

        ``known``: places of the past that are no drafts.
        """
        inner = [g.parents_at(depth + 1) for g in grown]
        n = max(map(len, inner))
        if n == 0:
            return past
        head, slots = self.head, past.positions.shape[1] - known
        states = past.keys.new_zeros(len(grown), n, head.shape.width)
        tokens = torch.zeros(len(grown), n, dtype=torch.int64)
        positions, way = (
            torch.full((len(grown), n), -1),
            torch.zeros(len(grown), n, slots + n, dtype=torch.bool),
        )
        for i, (g, nodes) in enumerate(zip(grown, inner, strict=True)):
            for k, node in enumerate(nodes):
                g.slots[node] = slots + k
                states[i, k] = g.states[g.asked.tree.parents[node]]
                tokens[i, k], positions[i, k] = g.tokens[node], g.base + depth - 1
                way[i, k, g.way(node)] = True
        device = states.device
        found, past = head(states, tokens.to(device), positions.to(device), past, way.to(device))
        for i, (g, nodes) in enumerate(zip(grown, inner, strict=True)):
            g.states |= {node: found[i, k] for k, node in enumerate(nodes)}
        return past

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
