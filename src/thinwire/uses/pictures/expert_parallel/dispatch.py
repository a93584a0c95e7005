"""Expert parallelism's two exchanges: tokens go to the ranks of their experts, and come back as outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.codecs import Codec, Rows
from thinwire.types import InputError, Mode, Packet, PayloadError, require
from thinwire.uses.pictures.arrivals import Received
from thinwire.uses.pictures.coding import Coding, Endpoints, mask_packet, wide
from thinwire.uses.pictures.diffusers_names.interfaces import ExpertLayer
from thinwire.uses.pictures.expert_parallel.pairs import Marked, WantedPairs, marked, moved, numbered
from thinwire.uses.pictures.messages import CheckedExchange, Posted, SentValues
from thinwire.uses.pictures.rank_message import Key, Packets, TensorKind

MOST_CHOICES = 1 << 26  # a peer's tokens times the experts here


@dataclass
class LayerTurn:
    """One layer in one call, and the outputs that are ``made`` in it: one row at least, so as to index it."""

    layer: ExpertLayer
    owned: Mapping[int, Sequence[int]]  # the experts of each rank
    key: Key
    step: int
    pairs: WantedPairs
    made: Tensor
    like: Tensor  # no rows of the tokens' width and type
    posted: Posted = field(init=False)  # what is awaited next: tokens, then outputs


class ExpertExchange:
    """The messages of all layers with each of the other ranks, and the references of one generation."""

    def __init__(self, exchange: CheckedExchange, codings: tuple[Coding, Coding]) -> None:
        self._exchange, self._codings = exchange, codings
        self.forget()

    def forget(self) -> None:
        """Begin without references."""
        self._to, self._back = (
            {rank: PeerRows(coding, rank, self._exchange) for rank in self._exchange.others}
            for coding in self._codings
        )

    def dispatch(self, turn: LayerTurn, x: Tensor, inputs: int) -> None:
        """Send tokens ``x`` to the ranks of their experts, and compute what this rank's own experts make."""
        key, packets, kept = turn.key, dict[int, Packets](), dict[int, SentValues]()
        with self._exchange.coding():
            packed, choices = key.pack(), key._replace(kind=TensorKind.CHOICES).pack()
            for rank, peer in self._to.items():
                tokens = turn.pairs.tokens[rank]
                sent, values = peer.send(x.index_select(0, tokens.there), tokens, packed, turn.step)
                packets[rank] = [mask_packet(turn.pairs.of(turn.owned[rank]), choices), *sent]
                kept |= {rank: values} if values else {}
        what = f"the tokens of {turn.layer.name}"
        turn.posted = self._exchange.scatter(what, key, inputs, packets, kept)
        own = turn.owned[self._exchange.rank]
        made = computed(turn.layer, own, x, turn.pairs.of(own))
        turn.made.index_copy_(0, turn.pairs.rows[self._exchange.rank], made)

    def compute(self, turn: LayerTurn, inputs: int) -> None:
        """Take the other ranks' tokens, and send back what this rank's experts make of them."""
        own, key = turn.owned[self._exchange.rank], turn.key._replace(kind=TensorKind.MADE)
        rows, wanted, marks = list[Tensor](), list[Tensor](), dict[int, Marked]()
        device = turn.like.device
        received = self._exchange.collect(turn.posted, device)
        with self._exchange.coding():
            for rank, (mask, *coded) in received.items():
                choices = self._to[rank].choices(turn.posted, mask, len(own))
                tokens, marks[rank] = marked([choices.any(1), choices.flatten()], device)
                rows.append(self._to[rank].take(turn.posted, coded, tokens, turn.like))
                wanted.append(choices[tokens.here])
        made = computed(turn.layer, own, torch.cat(rows), torch.cat(wanted))
        packets, kept = dict[int, Packets](), dict[int, SentValues]()
        with self._exchange.coding():
            parts = made.split([mark.many for mark in marks.values()])
            for (rank, mark), part in zip(marks.items(), parts, strict=True):
                packets[rank], values = self._back[rank].send(part, mark, key.pack(), turn.step)
                kept |= {rank: values} if values else {}
        what = f"the outputs of {turn.layer.name}"
        turn.posted = self._exchange.scatter(what, key, inputs, packets, kept)

    def combine(self, turn: LayerTurn) -> None:
        """Take what the other ranks' experts have made of this rank's tokens."""
        received = self._exchange.collect(turn.posted, turn.like.device)
        with self._exchange.coding():
            for rank, packets in received.items():
                made = self._back[rank].take(turn.posted, packets, turn.pairs.made[rank], turn.like)
                turn.made.index_copy_(0, turn.pairs.rows[rank], made)

    def drop(self, turns: Iterable[LayerTurn]) -> None:
        """Take what the others have sent of turns that nobody needs: it would stay in memory."""
        for posted in sorted((turn.posted for turn in turns), key=lambda posted: posted.step):
            if not self._exchange.drop(posted):  # a rank has left, and sends no more
                return


def computed(layer: ExpertLayer, own: Sequence[int], x: Tensor, wanted: Tensor) -> Tensor:
    """Return what the experts ``own`` make of tokens ``x`` [T, width], for whom [T, own] is ``wanted``, here.

    The outputs are in the order of tokens, then of experts. An expert is called once, or not at all.
    """
    numbers = numbered(wanted)
    picked = {place: wanted[:, place].nonzero()[:, 0] for place in range(len(own))}
    picked = {place: tokens for place, tokens in picked.items() if len(tokens)}
    made = x.new_empty((int(wanted.sum()), x.shape[1]))
    there = moved([i for k, tokens in picked.items() for i in (tokens, numbers[tokens, k])], x.device)
    for place, tokens, rows in zip(picked, there[::2], there[1::2], strict=True):
        made.index_copy_(0, rows, layer.each[own[place]](x.index_select(0, tokens)))
    return made


OTHER_TOKENS = "this rank has another number of tokens than in the step before; call reset() first"
PACKETS = 2  # of a message: rows that are new, and others; either may be empty


class PeerRows(Endpoints):
    """Both ends of rows of tokens to, and from, one peer, of which a message has some.

    Without a memory the rows go as one matrix: both ends know which they are. With one, both hold a reference
    of every row that ever travelled; a message then has those of now, by ``Rows`` in one entry, and before
    them the rows that travel for the first time, by the keyframe codec.
    """

    def __init__(self, coding: Coding, rank: int, exchange: CheckedExchange) -> None:
        super().__init__(coding, [rank])
        self._rank, self._exchange = rank, exchange
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # by key: rows as the peer has them, which it has

    def send(self, rows: Tensor, marks: Marked, key: int, step: int) -> tuple[Packets, SentValues | None]:
        """Return the packets for ``rows`` [n, width], those that are marked, and what they stand for."""
        if not len(rows):
            return [b""] * PACKETS, None
        coded = wide(self._coding.codec(step) or self._coding.scheme.codec, rows[None])
        if not self.remember:
            packet, _ = self._sender.encode(rows[None], [key], codec=coded)
            return [b"", packet], None
        whole = rows.new_zeros((len(marks.here), rows.shape[1]), dtype=torch.float32)
        whole.index_copy_(0, marks.there, rows.float())
        before, known = self._held.get(key, (torch.zeros_like(whole), torch.zeros_like(marks.here)))
        require(len(known) == len(marks.here), InputError, OTHER_TOKENS)
        packets = list[Packet | bytes]()
        first = wide(self._coding.scheme.keyframe, rows[None])
        new, others = marked([marks.here & ~known, marks.here & known], rows.device)
        for part, codec in ((new, first), (others, coded)):
            packets.append(b"")
            if part.many:
                news = before.index_copy(0, part.there, whole.index_select(0, part.there))
                packets[-1], before = self._encoded(news, key, codec)
        self._held[key] = before, known | marks.here
        return packets, SentValues(self, before[None], [key])

    def _encoded(self, rows: Tensor, key: int, codec: Codec) -> tuple[Packet, Tensor]:
        first, mode = rowwise(self._coding.scheme.keyframe), None
        if key in self._forgotten:
            mode = Mode.KEYFRAME
            self._forgotten.discard(key)
        packet, x_hat = self._sender.encode(
            rows[None], [key], codec=rowwise(codec), keyframe=first, mode=mode
        )
        return packet, x_hat[0]

    def take(self, posted: Posted, packets: Received, marks: Marked, like: Tensor) -> Tensor:
        """Return the rows that are marked of a message of the peer, [n, width], as ``like`` is."""
        n, width, key = marks.many, like.shape[1], posted.key._replace(source=self._rank).pack()
        due, whole = (len(marks.here) if self.remember else n), None
        for packet in packets:
            if packet is None:
                continue
            repaired = self._exchange.tally.repairs
            shapes = [(1, due, width)]
            whole = self._exchange.decode(posted, self, self._rank, packet, [key], shapes, like)[0]
            if self._exchange.tally.repairs > repaired:  # by the values after both packets
                break
        require((whole is not None) == (n > 0), PayloadError, f"rank {self._rank} sent no rows, or too many")
        if whole is None:
            return like.new_empty((0, width))
        return (whole.index_select(0, marks.there) if self.remember else whole).to(like.dtype)

    def choices(self, posted: Posted, packet: Packet | None, own: int) -> Tensor:
        """Return which of this rank's ``own`` experts the tokens of the peer are for: [T, own]."""
        text = f"rank {self._rank} says otherwise than expected which experts its tokens are for"
        if packet is None or math.prod(packet.spec.shape) > MOST_CHOICES:
            raise PayloadError(text)
        key = posted.key._replace(kind=TensorKind.CHOICES, source=self._rank).pack()
        shape, known = packet.spec.shape, len(packet.entries) == 1 and packet.entries[0].key == key
        fits = known and packet.spec.dtype == torch.bool and len(shape) == 2
        require(fits and shape[1] % max(1, own) == 0, PayloadError, text)
        made = self._receivers[self._rank].decode(packet)
        return made.view(-1, own) if own else torch.zeros(0, 0, dtype=torch.bool)


def rowwise(codec: Codec) -> Codec:
    """Return the codec by which some rows of many are sent: itself, if it is of rows."""
    return codec if isinstance(codec, Rows) else Rows(codec)
