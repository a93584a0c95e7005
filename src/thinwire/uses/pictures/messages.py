"""The messages of a generation: numbered, sent, awaited, checked against what is due, and repaired.

A rank whose reference of a peer is no longer the peer's asks for the values themselves. The peer answers from
the thread that reads its link, at any time, and sends a keyframe next. It is asked for one of its last
exchanges: it cannot be far ahead of a rank whose messages it needs.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from time import perf_counter
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from thinwire.collectives import MeshExchange
from thinwire.links.mailbox import Mailbox
from thinwire.links.mesh import Peer
from thinwire.types import DesyncError, InputError, LinkError, Packet, PayloadError, require
from thinwire.uses.pictures.arrivals import Arrivals, Received, arrived, is_last
from thinwire.uses.pictures.coding import Endpoints, Shape, whole
from thinwire.uses.pictures.message_bytes import device_of, opened, packing
from thinwire.uses.pictures.model_calls import PROMPT, Inquiry
from thinwire.uses.pictures.rank_message import Key, Packets, RankMessage, TensorKind
from thinwire.uses.pictures.send_lane import SendLane
from thinwire.verdicts import Questions


@dataclass(frozen=True)
class Posted:
    """An exchange that has begun, and what is due from the others: the same ``key`` but for its source."""

    step: int
    what: str
    key: Key
    inputs: int
    count: int  # packets of each message


_GENERATION = 32  # bits of an exchange's step below the number of its generation


class CheckedExchange:
    """The messages of one model on this rank; ``leave`` tells the others that no more come.

    ``due``: see ``Repairs``; ``alike``: what of the inputs all ranks must have in common.
    """

    def __init__(self, exchange: MeshExchange, deadline: float, due: int = 1, alike: str = PROMPT) -> None:
        self.tally, self.inquiry = ExchangeTally(), Inquiry(exchange, deadline, alike)
        self.rank, self.ranks = exchange.rank, exchange.ranks
        self.others = [rank for rank in self.ranks if rank != self.rank]
        self._exchange, self._deadline = exchange, deadline
        self._generation = self._number = 0
        self._questions, self._arrivals = Questions(), Arrivals(exchange)
        self._repairs, self._lane = Repairs(exchange, deadline, due), SendLane(self.abandon)

    def begin(self, generation: int) -> None:
        """Number the exchanges of another generation, from 0."""
        self._generation, self._number = generation, 0

    def abandon(self, cause: BaseException | None = None) -> None:
        """Tell whoever waits for more of this generation that no more comes: a call of the model failed."""
        self._exchange.post(self._step, RankMessage.stop(cause).pack())

    def skip(self) -> None:
        """Leave out a number, on this rank alone: whoever awaits the exchange gets what was said of it."""
        self._number += 1

    def post(
        self, what: str, key: Key, inputs: int, packets: Packets, kept: SentValues | None = None
    ) -> Posted:
        """Send the same packets to all others; ``kept``: see ``scatter``."""
        step, begun = self._step, RankMessage(key.pack(), inputs, packets).packing()
        if kept is not None:
            self._keep(dict.fromkeys(self.others, kept))

        def send() -> None:
            body = begun()
            self._exchange.hand_over(step, dict.fromkeys(self.others, body))
            self.tally.count(key.kind, len(body) * len(self.others))

        self._lane.do(device_of(packets), send)
        return self._posted(Posted(step, what, key, inputs, len(packets)))

    def scatter(
        self,
        what: str,
        key: Key,
        inputs: int,
        packets: Mapping[int, Packets],
        kept: Mapping[int, SentValues],
    ) -> Posted:
        """Send each of the others packets of its own.

        ``kept``: what they stand for, remembered where a packet cannot be decoded by itself.
        """
        step, number = self._step, key.pack()
        begun = {rank: RankMessage(number, inputs, own).packing() for rank, own in packets.items()}
        self._keep(kept)

        def send() -> None:
            bodies = {rank: packed() for rank, packed in begun.items()}
            self._exchange.hand_over(step, bodies)
            self.tally.count(key.kind, sum(map(len, bodies.values())))

        self._lane.do(device_of([each for own in packets.values() for each in own]), send)
        return self._posted(Posted(step, what, key, inputs, len(packets[self.others[0]])))

    def due(self, what: str, key: Key, inputs: int, count: int) -> Posted:
        """Return an exchange in which this rank sends nothing, to be collected."""
        self._number += 1
        return Posted(self._step - 1, what, key, inputs, count)

    def collect(self, posted: Posted, device: torch.device) -> dict[int, Received]:
        """Return the packets of all others in this exchange, by rank, on ``device``.

        Of tokens to experts the first one is on the host. Errors: ``LinkError`` naming a rank that is silent
        or has left; ``InputError``, ``DesyncError`` and ``PayloadError`` for one that calls the model
        otherwise.
        """
        start = perf_counter()
        received = self._exchange.collect(posted.step, self._deadline, posted.what, is_last)
        self.tally.wait_s += perf_counter() - start
        self._lane.check()
        messages = {rank: arrived(body) for rank, body in received.items()}
        for rank, one in messages.items():
            check(rank, one.message, posted, self.inquiry)
        self._arrivals.begin(device)
        with self.coding():
            return {rank: self._arrivals.take(one, device) for rank, one in messages.items()}

    def decode(
        self,
        posted: Posted,
        ends: Endpoints,
        rank: int,
        packet: Packet | None,
        keys: Sequence[int],
        shapes: Sequence[Shape],
        to: Tensor,
    ) -> Tensor:
        """Return the tensor in a packet of ``rank``, asking it for the values where it has other references.

        Whether a device makes of it what the sender did is asked at the end of the call.
        """
        try:
            return ends.decode(rank, packet, keys, shapes, to, self._questions)
        except DesyncError:
            self.tally.repairs += 1
            return ends.replace(rank, self._repairs.ask(rank, posted.step, to.device), keys, shapes, to)

    def drop(self, posted: Posted) -> bool:
        """Take what the others have sent in an exchange, unread; return whether all of them go on."""
        found = self._exchange.collect(posted.step, self._deadline, posted.what, is_last)
        messages = list(map(arrived, found.values()))
        for one in messages:
            self._arrivals.drop(one)
        return not any(one.message.stopped for one in messages)

    def end(self) -> None:
        """End a call of the model: its messages are with the links, and what it has taken is right."""
        self._lane.flush()
        self.settle()
        self.tally.calls += 1

    def settle(self) -> None:
        """Ask the device whether what was decoded is right. Errors: ``DesyncError``, ``PayloadError``."""
        self._questions.settle()

    def renew(self) -> None:
        """Forget the error of the call before, and what a device was not asked of it."""
        self._lane.renew()
        self._questions = Questions()

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the others not to wait for this rank, in this picture and at the beginning of the next."""
        self.inquiry.leave()
        self._lane.close()
        self._arrivals.end()
        self._repairs.leave()
        with suppress(LinkError):
            self.abandon(cause)
            self.begin(self._generation + 1)
            self.abandon(cause)

    @contextmanager
    def coding(self) -> Iterator[None]:
        """Count the seconds of the block as those of coding."""
        start = perf_counter()
        yield
        self.tally.code_s += perf_counter() - start

    @property
    def _step(self) -> int:
        return self._generation << _GENERATION | self._number

    def _keep(self, kept: Mapping[int, SentValues]) -> None:
        if any(each.ends.remember for each in kept.values()):
            self._repairs.keep(self._step, kept)

    def _posted(self, posted: Posted) -> Posted:
        self._number += 1
        self.tally.exchanges += 1
        return posted


def check(rank: int, message: RankMessage, due: Posted, inquiry: Inquiry) -> None:
    """Raise ``LinkError``, ``InputError``, ``DesyncError`` or ``PayloadError`` for what is not due."""
    message.check_sender(rank)
    if message.inputs != due.inputs:
        raise InputError(inquiry.cause(rank))
    if message.key != due.key._replace(source=rank).pack():
        text = f"rank {rank} is at another layer than {due.what} here; call the model alike on all ranks"
        raise DesyncError(text)
    if len(message.packets) != due.count:
        text = f"rank {rank} sent {len(message.packets)} packets for {due.what}, where {due.count} are due"
        raise PayloadError(text)


@dataclass
class ExchangeTally:
    """Counts and seconds so far; bytes are those of messages, to all peers together."""

    calls: int = 0
    exchanges: int = 0
    nbytes: int = 0
    output_nbytes: int = 0  # of these, for the joined outputs
    repairs: int = 0  # packets that could not be decoded, and were asked for as values
    wait_s: float = 0.0
    code_s: float = 0.0

    def count(self, kind: TensorKind, nbytes: int) -> None:
        """Count the bytes of a message, to all peers together."""
        self.nbytes += nbytes
        self.output_nbytes += nbytes if kind == TensorKind.OUTPUT else 0


_STEP = struct.Struct("<Q")
_LEFT: WeakKeyDictionary[Mailbox, ref[Repairs]] = WeakKeyDictionary()  # their handlers keep them


@dataclass(frozen=True)
class SentValues:
    """What a peer decodes a packet to, and the ends that coded it."""

    ends: Endpoints
    values: Tensor
    keys: Sequence[int]


class Repairs:
    """Ask the peers of an exchange, and answer those that ask.

    ``due``: how many exchanges of this rank a peer may not have decoded yet when the last of them is sent.
    """

    def __init__(self, exchange: MeshExchange, deadline: float, due: int = 1) -> None:
        self._peers, self._name, self._deadline = exchange.peers, exchange.name, deadline
        self._due = due
        self._kept: deque[tuple[int, Mapping[int, SentValues]]] = deque(maxlen=due + 1)
        self._lock = Lock()
        for rank, peer in self._peers.items():
            peer.mailbox.on(self._tag("again"), partial(self._answer, rank, peer))

    def await_of_each(self, due: int) -> None:
        """Keep so many exchanges from now on."""
        if due != self._due:
            with self._lock:
                self._due, self._kept = due, deque(self._kept, maxlen=due + 1)

    def keep(self, step: int, kept: Mapping[int, SentValues]) -> None:
        """Remember what is sent in an exchange, by rank, should a peer ask for it."""
        with self._lock:
            self._kept.append((step, kept))

    def ask(self, rank: int, step: int, device: torch.device) -> Packet | None:
        """Return the packet of the values that a peer sent in an exchange. Errors: ``DesyncError``."""
        peer, place = self._peers[rank], _STEP.pack(step)
        peer.mailbox.send(self._tag("again") + place, b"")
        others = self._peers.values()
        data = peer.get(self._tag("whole") + place, self._deadline, "the values once more", others)
        require(bool(data), DesyncError, f"the references for rank {rank} are lost; begin the picture anew")
        return opened([data], device)[0]

    def leave(self) -> None:
        """Keep what a peer may still ask for alone, and of one use of the mesh alone."""
        with self._lock:
            while len(self._kept) > self._due:
                self._kept.popleft()
        mailbox = next(iter(self._peers.values())).mailbox
        before = _LEFT.get(mailbox, lambda: None)()
        if before is not None:
            before.clear()
        _LEFT[mailbox] = ref(self)

    def clear(self) -> None:
        """Forget what was sent: the answer is now that there is none."""
        with self._lock:
            self._kept.clear()

    def _tag(self, kind: str) -> bytes:
        return f"{self._name}/{kind}/".encode()

    def _answer(self, rank: int, peer: Peer, tag: bytes, body: bytes) -> None:
        place = tag.removeprefix(self._tag("again"))
        with self._lock:
            found = [by_rank[rank] for step, by_rank in self._kept if _STEP.pack(step) == place]
            for kept in found:
                kept.ends.forget(kept.keys)
        [data] = packing([whole(found[0].values, found[0].keys)])() if found else [b""]
        peer.mailbox.send(self._tag("whole") + place, data)
