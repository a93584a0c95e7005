"""What a stage does with tokens: it takes hidden states out of packets, extends them, and codes its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.types import TensorSpec
from thinwire.uses.serving.drafting.draft_head import DraftHead
from thinwire.uses.serving.drafting.head_drafts import AskedDrafts, HeadDrafts
from thinwire.uses.serving.ring_messages import Picked, Portion
from thinwire.uses.serving.row_pool import StageCache
from thinwire.uses.serving.token_picking import Picking, agreed

MOST_MICROS = (1 << 32) - 1
PROMPT = 16  # tokens: a portion of at least as many is a prompt's


class Extends(Protocol):
    """A stage of a model (``thinwire.runs.models.stage.ModelStage``)."""

    first: bool
    last: bool

    def extend(
        self,
        x: Tensor,
        positions: Tensor,
        masks: Mapping[str, Tensor],
        cache: Any,
        keep: Tensor | None = None,
    ) -> Tensor: ...

    def tell_hidden(self, told: Callable[[Tensor], object]) -> None: ...

    @property
    def head_rows(self) -> Tensor: ...


@dataclass
class StageSeconds:
    """What a stage did: seconds by kind, tokens, and forward passes."""

    compute: float = 0.0
    coding: float = 0.0
    tokens: int = 0
    passes: int = 0
    packets: int = 0  # bytes


@dataclass(eq=False)
class StageWork:
    """One stage with its cache. ``prompt``, ``token``: how it sends hidden states of either.

    ``dtype``: of hidden states here and on the link; ``width``: their values a token.
    """

    stage: Extends
    cache: StageCache
    width: int
    prompt: Scheme
    token: Scheme
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    spent: StageSeconds = field(default_factory=StageSeconds)

    def __post_init__(self) -> None:
        self._senders = {prompt: Sender(self.prompt if prompt else self.token) for prompt in (True, False)}
        self._receiver, self._number = Receiver(), itertools.count()
        self._keeps_hidden = False
        self.hidden = torch.empty(0)  # [n, D]: on the last stage, what its head had in the last pass

    def drafts_by(self, head: DraftHead) -> HeadDrafts:
        """Return what proposes tokens beside the last stage, by a head in the stage's dtype; keep ``hidden``.

        Errors: ``InputError`` for a head of another model.
        """
        if not self._keeps_hidden:  # once, however many rings there are
            self.stage.tell_hidden(lambda x: setattr(self, "hidden", x[0]))
            self._keeps_hidden = True
        return HeadDrafts(head.to(self.device, self.dtype).bind(self.stage.head_rows))

    def extend(self, portions: Sequence[Portion], x: Tensor) -> Tensor:
        """Return hidden states [1, n, D], on the last stage the logits that are wanted [1, w, V].

        ``x``: token ids [1, n] on the first stage, else hidden states [1, n, D], of all portions in a row.
        """
        began = time.perf_counter()
        segments = [p.segment for p in portions]
        with torch.inference_mode():
            for p in portions:
                if p.kept:
                    self.cache.move(p.segment.rows, p.kept, p.segment.at - len(p.kept))
            masks = self.cache.begin(segments, self.dtype)
            keep = _wanted(portions).to(self.device) if self.stage.last else None
            positions = masks.pop("positions")
            found = self.stage.extend(x.to(self.device), positions, masks, self.cache, keep)
        self.spent.compute += time.perf_counter() - began
        self.spent.tokens += x.shape[1]
        self.spent.passes += 1
        return found

    def code(self, portions: Sequence[Portion], hidden: Tensor) -> list[Portion]:
        """Return the portions with packets of their hidden states [1, n, D]."""
        began, found, at = time.perf_counter(), list[Portion](), 0
        for p in portions:
            many = p.segment.many
            sender = self._senders[many >= PROMPT and not p.drafted]
            packet, _ = sender.encode(hidden[:, at : at + many].contiguous(), [next(self._number)])
            data = wire.packed(packet, summed=False)
            found.append(replace(p, packet=data))
            self.spent.packets += len(data)
            at += many
        self.spent.coding += time.perf_counter() - began
        return found

    def decode(self, portions: Sequence[Portion]) -> Tensor:
        """Return the hidden states [1, n, D] in the packets of portions. Errors: ``PayloadError``."""
        began, found = time.perf_counter(), list[Tensor]()
        for p in portions:
            expect = TensorSpec((1, p.segment.many, self.width), self.dtype)
            packet = wire.unpack(p.packet, summed=False)
            found.append(self._receiver.decode(packet, expect=expect, device=self.device).to(self.dtype))
        self.spent.coding += time.perf_counter() - began
        return torch.cat(found, 1)


@dataclass(eq=False)
class Answers:
    """What the last stage answers: tokens that are picked, and drafts behind them where it has a ``head``.

    ``picking`` says how, by request.
    """

    work: StageWork
    picking: dict[int, Picking] = field(default_factory=dict)
    head: HeadDrafts | None = None

    def open(self, request: int, picking: Picking, tail: Sequence[int] = (), tail_at: int = 0) -> None:
        """Hear of a request: how its tokens are picked, and the end of its prompt (see ``HeadDrafts``)."""
        self.picking[request] = picking
        if self.head is not None and tail:
            self.head.begin(request, tail, tail_at)

    def close(self, request: int) -> None:
        """Hear that a request is over."""
        self.picking.pop(request, None)
        if self.head is not None:
            self.head.forget(request)

    def of(self, portions: Sequence[Portion], logits: Tensor) -> list[Picked]:
        """Return the tokens that logits [1, w, V] say, for the portions that want some."""
        found, asked = list[Picked](), list[AskedDrafts]()
        at = place = 0  # among the logits, and among the hidden states
        for p in portions:
            s, picking = p.segment, self.picking[p.segment.request]
            behind = s.at + s.many - p.wanted + 1  # the position of the first token that is wanted
            if p.wanted:
                own = logits[0, at : at + p.wanted]
                tokens, way = agreed(own, p.drafted, behind, picking, s.parents)
                found.append(Picked(s.request, behind, tuple(tokens)))
            if self.head is not None and s.request in self.head:
                states = self.work.hidden[place : place + s.many]
                before, own = states[: s.many - p.wanted], states[s.many - p.wanted :]
                if len(before):
                    self.head.pass_by(s.request, s.at, before)
                if p.wanted:
                    right = own[[0, *(1 + node for node in way)]]
                    asked.append(self.head.ask(s.request, behind - 1, right, tokens, p.ahead, picking))
            at, place = at + p.wanted, place + s.many
        return found if self.head is None or not asked else _with_drafts(found, self.head, asked)


def _with_drafts(found: list[Picked], head: HeadDrafts, asked: list[AskedDrafts]) -> list[Picked]:
    """Return what was picked with what the head proposes behind it."""
    began = time.perf_counter()
    drafts = dict(zip((a.request for a in asked), head.draft(asked), strict=True))
    each = (time.perf_counter() - began) / max(1, *(a.tree.depth for a in asked))
    micros = min(int(1e6 * each), MOST_MICROS)
    return [p._replace(drafts=tuple(drafts.get(p.request, ())), micros=micros) for p in found]


def _wanted(portions: Sequence[Portion]) -> Tensor:
    """Return the places, in all portions in a row, whose next token is wanted."""
    found, at = list[Tensor](), 0
    for p in portions:
        at += p.segment.many
        found.append(torch.arange(at - p.wanted, at))
    return torch.cat(found)
