"""The steps of a pair: hidden states go to the second half, and their gradients come back."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from thinwire.channels.references import TensorStore
from thinwire.links.mesh import Peer
from thinwire.types import ThinwireError, require
from thinwire.uses.training.pipeline.boundary import Incoming, Outgoing, StageTally, slots
from thinwire.uses.training.pipeline.choosing.pipeline_policy import BACKWARD, FORWARD
from thinwire.uses.training.pipeline.compressed_stage import Schemes

PARTS = 4  # micro-batches of a step: the halves work at the same time
WAIT = 120.0  # seconds without anything from a partner that is there
NORM = b"N"
Half = Callable[[nn.Module, Tensor, Tensor | None], Tensor]


@dataclass(eq=False)
class PairCrossing:
    """The loss of one half, as ``take_steps`` calls it, in step with the partner's.

    ``half`` takes the model, blocks [B, seq + 1] and, in the second half, the hidden state [B, L, ``width``].
    It returns the hidden state, in the second half the mean loss. Gradients are on the parameters once a loss
    is returned. The norm that ``clip`` bounds is of both halves. ``scale``: as of ``take_steps``.
    """

    index: int
    half: Half
    width: int
    recipe: Schemes
    clip: float = 0.0
    scale: float = 1.0
    peer: Peer | None = field(default=None, init=False)

    def connect(self, peer: Peer) -> None:
        """Take steps with this partner from now on."""
        self.close()
        self.peer, tally = peer, StageTally()
        out, back = (FORWARD, BACKWARD) if self.index == 0 else (BACKWARD, FORWARD)
        self._out = Outgoing(out, self.index, self.recipe.schemes[out], TensorStore(), tally, own_lane=False)
        self._in = Incoming(back, self.index, TensorStore(), tally, WAIT, own_lane=False)

    def close(self) -> None:
        """Wait for this partner no longer."""
        if self.peer is not None:
            self._out.close()
            self._in.close()
        self.peer = None

    def __call__(self, model: nn.Module, blocks: Tensor) -> Tensor:
        """Return the loss of a batch, in the first half 0, whose backward pass is done."""
        require(self.peer is not None, ThinwireError, "a half without a partner cannot take a step")
        parts = blocks.tensor_split(min(PARTS, len(blocks)))
        loss = self._first(model, parts) if self.index == 0 else self._second(model, parts)
        self._out.settle()
        if self.clip:
            self._bound([p.grad for p in model.parameters() if p.grad is not None])
        return loss.detach().requires_grad_()

    def _first(self, model: nn.Module, parts: tuple[Tensor, ...]) -> Tensor:
        sent = []
        for m, part in enumerate(parts):
            sent.append(self.half(model, part, None))
            self._send(m, sent[-1])
        for m, hidden in enumerate(sent):
            hidden.backward(self._land(m, hidden.detach()))
        return torch.zeros(())

    def _second(self, model: nn.Module, parts: tuple[Tensor, ...]) -> Tensor:
        many = [max(1, int((part[:, 1:] >= 0).sum())) for part in parts]
        loss = torch.zeros((), device=parts[0].device)
        for m, part in enumerate(parts):
            shape = len(part), part.shape[1] - 1, self.width
            hidden = self._land(m, torch.empty(shape, device=part.device)).requires_grad_()
            found = self.half(model, part, hidden) * (many[m] / sum(many))
            (found * self.scale).backward()
            self._send(m, hidden.grad if hidden.grad is not None else torch.zeros_like(hidden))
            loss += found.detach()
        return loss

    def _send(self, m: int, x: Tensor) -> None:
        if self.peer is not None:
            self._out.send(self.peer, m, x, slots(m, len(x)), training=True)

    def _land(self, m: int, like: Tensor) -> Tensor:
        buffer = torch.empty_like(like)
        if self.peer is not None:
            self._in.expect(m, buffer, self.peer)
        self._in.land(m, more=False)
        return buffer

    def _bound(self, grads: list[Tensor]) -> None:
        """Scale the gradients so that their norm over both halves is ``clip`` at most."""
        own = float(nn.utils.get_total_norm(grads)) / self.scale if grads else 0.0
        if self.peer is None:
            return
        self.peer.mailbox.send(NORM, struct.pack("<d", own))
        (theirs,) = struct.unpack("<d", self.peer.get(NORM, WAIT, "the norm of its gradients"))
        norm = math.hypot(own, theirs)
        if norm > self.clip:
            torch._foreach_mul_(grads, self.clip / (norm + 1e-6))
