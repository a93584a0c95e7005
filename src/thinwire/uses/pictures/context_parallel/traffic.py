"""The messages of a generation: numbered, sent, awaited, and checked against what is due."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from thinwire.collectives import MeshExchange
from thinwire.types import DesyncError, InputError, LinkError, PayloadError, require
from thinwire.uses.pictures.context_parallel.ends import Ends, Shape
from thinwire.uses.pictures.context_parallel.inquiry import PROMPT, Inquiry
from thinwire.uses.pictures.context_parallel.keys import Key
from thinwire.uses.pictures.context_parallel.message import Message, is_last
from thinwire.uses.pictures.context_parallel.repairs import Kept, Repairs
from thinwire.uses.pictures.context_parallel.tally import Tally

_GENERATION = 32  # bits of an exchange's step below the number of its generation
Packets = Sequence[bytes | memoryview]


@dataclass(frozen=True)
class Posted:
    """An exchange that has begun, and what is due from the others: the same ``key`` but for its source."""

    step: int
    what: str
    key: Key
    inputs: int
    count: int  # packets of each message


class Traffic:
    """The messages of one model on this rank; ``leave`` tells the others that no more come.

    ``due``: see ``Repairs``; ``alike``: what of the inputs all ranks must have in common.
    """

    def __init__(self, exchange: MeshExchange, deadline: float, due: int = 1, alike: str = PROMPT) -> None:
        self.tally, self.inquiry = Tally(), Inquiry(exchange, deadline, alike)
        self.rank, self.ranks = exchange.rank, exchange.ranks
        self.others = [rank for rank in self.ranks if rank != self.rank]
        self._exchange, self._deadline = exchange, deadline
        self._generation = self._number = 0
        self._repairs = Repairs(exchange, deadline, due)

    def begin(self, generation: int) -> None:
        """Number the exchanges of another generation, from 0."""
        self._generation, self._number = generation, 0

    def abandon(self, cause: BaseException | None = None) -> None:
        """Tell whoever waits for more of this generation that no more comes: a call of the model failed."""
        self._exchange.post(self._step, Message.stop(cause).pack())

    def skip(self) -> None:
        """Leave out a number, on this rank alone: whoever awaits the exchange gets what was said of it."""
        self._number += 1

    def post(self, what: str, key: Key, inputs: int, packets: Packets) -> Posted:
        """Send the same packets to all others."""
        body = Message(key.pack(), inputs, packets).pack()
        self._exchange.post(self._step, body)
        return self._posted(Posted(self._step, what, key, inputs, len(packets)), len(body) * len(self.others))

    def scatter(self, what: str, key: Key, inputs: int, packets: Mapping[int, Packets]) -> Posted:
        """Send each of the others packets of its own."""
        bodies = {rank: Message(key.pack(), inputs, own).pack() for rank, own in packets.items()}
        self._exchange.scatter(self._step, bodies)
        count = len(packets[self.others[0]])
        return self._posted(Posted(self._step, what, key, inputs, count), sum(map(len, bodies.values())))

    def due(self, what: str, key: Key, inputs: int, count: int) -> Posted:
        """Return an exchange in which this rank sends nothing, to be collected."""
        self._number += 1
        return Posted(self._step - 1, what, key, inputs, count)

    def collect(self, posted: Posted) -> dict[int, Packets]:
        """Return the packets of all others in this exchange, by rank.

        Errors: ``LinkError`` naming a rank that is silent or has left; ``InputError``, ``DesyncError`` and
        ``PayloadError`` for one that calls the model otherwise.
        """
        start = perf_counter()
        received = self._exchange.collect(posted.step, self._deadline, posted.what, is_last)
        self.tally.wait_s += perf_counter() - start
        messages = {rank: Message.unpack(body) for rank, body in received.items()}
        for rank, message in messages.items():
            check(rank, message, posted, self.inquiry)
        return {rank: message.packets for rank, message in messages.items()}

    def keep(self, kept: Mapping[int, Kept]) -> None:
        """Remember what the next message to each rank stands for, where it cannot be decoded by itself."""
        if any(each.ends.remember for each in kept.values()):
            self._repairs.keep(self._step, kept)

    def decode(
        self,
        posted: Posted,
        ends: Ends,
        rank: int,
        data: bytes | memoryview,
        keys: Sequence[int],
        shapes: Sequence[Shape],
        to: Tensor,
    ) -> Tensor:
        """Return the tensor in a packet of ``rank``, asking it for the values where references differ."""
        try:
            return ends.decode(rank, data, keys, shapes, to)
        except DesyncError:
            self.tally.repairs += 1
            return ends.replace(rank, self._repairs.ask(rank, posted.step), keys, shapes, to)

    def drop(self, posted: Posted) -> bool:
        """Take what the others have sent in an exchange, unread; return whether all of them go on."""
        found = self._exchange.collect(posted.step, self._deadline, posted.what, is_last)
        return not any(Message.unpack(body).stopped for body in found.values())

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the others not to wait for this rank, in this picture and at the beginning of the next."""
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

    def _posted(self, posted: Posted, nbytes: int) -> Posted:
        self._number += 1
        self.tally.exchanges += 1
        self.tally.nbytes += nbytes
        return posted


def check(rank: int, message: Message, due: Posted, inquiry: Inquiry) -> None:
    """Raise ``LinkError``, ``InputError``, ``DesyncError`` or ``PayloadError`` for what is not due."""
    message.check_sender(rank)
    if message.inputs != due.inputs:
        raise InputError(inquiry.cause(rank))
    text = f"rank {rank} is at another layer than {due.what} here; call the model alike on all ranks"
    require(message.key == due.key._replace(source=rank).pack(), DesyncError, text)
    text = f"rank {rank} sent {len(message.packets)} packets for {due.what}, where {due.count} are due"
    require(len(message.packets) == due.count, PayloadError, text)
