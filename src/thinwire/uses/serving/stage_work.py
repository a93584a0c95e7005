"""What a stage does with tokens: it takes hidden states out of packets, extends them, and codes its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.types import TensorSpec
from thinwire.uses.serving.ring_messages import Picked, Portion
from thinwire.uses.serving.row_pool import StageCache
from thinwire.uses.serving.token_picking import Picking, agreed

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

    def extend(self, portions: Sequence[Portion], x: Tensor) -> Tensor:
        """Return hidden states [1, n, D], on the last stage the logits that are wanted [1, w, V].

        ``x``: token ids [1, n] on the first stage, else hidden states [1, n, D], of all portions in a row.
        """
        began = time.perf_counter()
        segments = [p.segment for p in portions]
        with torch.inference_mode():
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
            sender = self._senders[many >= PROMPT]
            packet, _ = sender.encode(hidden[:, at : at + many].contiguous(), [next(self._number)])
            data = wire.packed(packet, summed=False)
            found.append(Portion(p.segment, p.wanted, p.drafted, data))
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


def picked(portions: Sequence[Portion], logits: Tensor, picking: Mapping[int, Picking]) -> list[Picked]:
    """Return the tokens that logits [1, w, V] say, for the portions that want some."""
    found, at = list[Picked](), 0
    for p in portions:
        if not p.wanted:
            continue
        s = p.segment
        behind = s.at + s.many - p.wanted + 1  # the position of the first token that is wanted
        own = logits[0, at : at + p.wanted]
        found.append(Picked(s.request, behind, tuple(agreed(own, p.drafted, behind, picking[s.request]))))
        at += p.wanted
    return found


def _wanted(portions: Sequence[Portion]) -> Tensor:
    """Return the places, in all portions in a row, whose next token is wanted."""
    found, at = list[Tensor](), 0
    for p in portions:
        at += p.segment.many
        found.append(torch.arange(at - p.wanted, at))
    return torch.cat(found)
