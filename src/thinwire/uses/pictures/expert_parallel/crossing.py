"""Two ways of tokens: to the ranks of their experts, and back as what these have made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import Receiver
from thinwire.types import PayloadError, require
from thinwire.uses.pictures.context_parallel.coding import Coding
from thinwire.uses.pictures.context_parallel.ends import pack_mask
from thinwire.uses.pictures.context_parallel.keys import Key, Kind
from thinwire.uses.pictures.context_parallel.repairs import Kept
from thinwire.uses.pictures.context_parallel.traffic import Packets, Posted, Traffic
from thinwire.uses.pictures.expert_parallel.lines import Line
from thinwire.uses.pictures.expert_parallel.owners import Owners
from thinwire.uses.pictures.expert_parallel.seam import Layer

MOST_CHOICES = 1 << 26  # a peer's tokens times the experts here


@dataclass
class Turn:
    """One layer in one call. ``wanted`` [T, experts]: which pairs are computed; ``made``: their outputs."""

    layer: Layer
    key: Key
    step: int
    wanted: Tensor
    numbers: Tensor  # [T, experts]: of each wanted pair, its row of ``made``
    made: Tensor
    like: Tensor  # no rows of the tokens' width and type
    tokens: Posted | None = None
    back: Posted | None = None

    @classmethod
    def of(cls, layer: Layer, key: Key, step: int, x: Tensor, wanted: Tensor) -> Turn:
        numbers = wanted.flatten().cumsum(0).view_as(wanted) - 1
        return cls(layer, key, step, wanted, numbers, x.new_empty((int(wanted.sum()), x.shape[1])), x[:0])

    def rows(self, experts: Sequence[int]) -> Tensor:
        """Return the rows of ``made`` that some experts make, in the order of tokens, then of experts."""
        return self.numbers[:, experts][self.wanted[:, experts]]


class Crossing:
    """The messages of all layers with each of the other ranks, and the references of one generation."""

    def __init__(self, traffic: Traffic, codings: tuple[Coding, Coding], owners: Owners) -> None:
        self._traffic, self._codings, self._owners = traffic, codings, owners
        self.forget()

    def forget(self) -> None:
        """Begin without references."""
        to, back = self._codings
        self._to = {rank: Line(to, rank) for rank in self._traffic.others}
        self._back = {rank: Line(back, rank) for rank in self._traffic.others}

    def dispatch(self, turn: Turn, x: Tensor, inputs: int) -> None:
        """Send tokens ``x`` to the ranks of their experts, and compute what this rank's own experts make."""
        owned, packets, kept = self._owners.of(turn.layer.experts), dict[int, Packets](), dict[int, Kept]()
        key = turn.key._replace(kind=Kind.TOKENS)
        with self._traffic.coding():
            for rank, line in self._to.items():
                part = turn.wanted[:, owned[rank]]
                marked = part.any(1)
                sent, values = line.send(x[marked], marked, key.pack(), turn.step)
                mask = pack_mask(part, key._replace(kind=Kind.CHOICES).pack())
                packets[rank] = [mask, *sent]
                kept |= {rank: values} if values else {}
        turn.tokens = self._scatter(f"the tokens of {turn.layer.name}", key, inputs, packets, kept)
        own = owned[self._traffic.rank]
        turn.made[turn.rows(own)] = computed(turn.layer, own, [(x, turn.wanted[:, own])])[0]

    def serve(self, turn: Turn, inputs: int) -> None:
        """Take the other ranks' tokens, and send back what this rank's experts make of them."""
        own, posted = self._owners.of(turn.layer.experts)[self._traffic.rank], _of(turn.tokens)
        parts, marks = dict[int, tuple[Tensor, Tensor]](), dict[int, Tensor]()
        received = self._traffic.collect(posted)
        with self._traffic.coding():
            for rank, (mask, *coded) in received.items():
                wanted = self._choices(posted, rank, mask, len(own)).to(turn.like.device)
                marked = wanted.any(1)
                rows = self._to[rank].take(self._traffic, posted, coded, marked, turn.like)
                parts[rank], marks[rank] = (rows, wanted[marked]), wanted.flatten()
        made = dict(zip(parts, computed(turn.layer, own, list(parts.values())), strict=True))
        packets, kept = dict[int, Packets](), dict[int, Kept]()
        key = turn.key._replace(kind=Kind.MADE)
        with self._traffic.coding():
            for rank, mark in marks.items():
                sent, values = self._back[rank].send(made[rank], mark, key.pack(), turn.step)
                packets[rank] = sent
                kept |= {rank: values} if values else {}
        turn.back = self._scatter(f"the outputs of {turn.layer.name}", key, inputs, packets, kept)

    def collect(self, turn: Turn) -> None:
        """Take what the other ranks' experts have made of this rank's tokens."""
        owned, posted = self._owners.of(turn.layer.experts), _of(turn.back)
        received = self._traffic.collect(posted)
        with self._traffic.coding():
            for rank, packets in received.items():
                marked = turn.wanted[:, owned[rank]].flatten()
                rows = self._back[rank].take(self._traffic, posted, packets, marked, turn.like)
                turn.made[turn.rows(owned[rank])] = rows

    def drop(self, turns: Iterable[Turn]) -> None:
        """Take what the others have sent of turns that nobody needs: it would stay in memory."""
        due = [posted for turn in turns if (posted := turn.back or turn.tokens) is not None]
        for posted in sorted(due, key=lambda posted: posted.step):
            if not self._traffic.drop(posted):  # a rank has left, and sends no more
                return

    def _scatter(
        self, what: str, key: Key, inputs: int, packets: Mapping[int, Packets], kept: Mapping[int, Kept]
    ) -> Posted:
        self._traffic.keep(kept)
        return self._traffic.scatter(what, key, inputs, packets)

    def _choices(self, posted: Posted, rank: int, data: bytes | memoryview, own: int) -> Tensor:
        """Return which of this rank's experts the tokens of a peer are for: [T, own]."""
        packet = wire.unpack(data, MOST_CHOICES)
        key = posted.key._replace(kind=Kind.CHOICES, source=rank).pack()
        shape = packet.spec.shape
        fits = (
            packet.spec.dtype == torch.bool and len(shape) == 2 and [e.key for e in packet.entries] == [key]
        )
        fits = fits and shape[1] % max(1, own) == 0
        require(
            fits, PayloadError, f"rank {rank} says otherwise than expected which experts its tokens are for"
        )
        return Receiver().decode(packet).view(-1, own) if own else torch.zeros(0, 0, dtype=torch.bool)


def computed(layer: Layer, own: Sequence[int], parts: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return what the experts ``own`` make of each part: tokens [T, width] and for whom [T, own].

    The outputs are in the order of tokens, then of experts. An expert is called once, or not at all.
    """
    made = [x.new_empty((int(wanted.sum()), x.shape[1])) for x, wanted in parts]
    for place, expert in enumerate(own):
        picked = [wanted[:, place] for _, wanted in parts]
        counts = [int(p.sum()) for p in picked]
        if not any(counts):
            continue
        rows = layer.compute(expert, torch.cat([x[p] for (x, _), p in zip(parts, picked, strict=True)]))
        for out, (_, wanted), some in zip(made, parts, rows.split(counts), strict=True):
            numbers = wanted.flatten().cumsum(0).view_as(wanted) - 1
            out[numbers[:, place][wanted[:, place]]] = some
    return made


def _of(posted: Posted | None) -> Posted:
    require(posted is not None, PayloadError, "a turn that was never sent; please report it")
    return posted  # type: ignore[return-value]  # require has checked it
