"""What replicas send each other: posted at once, read in the order of posting.

A message is packets, or nothing but its head where values go as they are: these are summed beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import Exchange, Reduction
from thinwire.types import InputError, Payload, ThinwireError
from thinwire.uses.training.replicas.controller import Controller, ExchangeMessage

Packets = Sequence[bytes | memoryview]
Coded = Sequence[tuple[Codec, Payload]]  # the payload of each packet, where it was made


@dataclass(frozen=True)
class CodedMessage:
    """The packets of a message, and what they were packed of: a rank does not read its own packets."""

    packets: Sequence[bytes]
    coded: Coded


@dataclass(frozen=True)
class Arrived:
    """What all ranks posted in one message: packets of the others by rank, this rank's own as it coded it.

    ``total``: instead of these, the sum of what all ranks posted as it is. ``draining``: ranks that wait
    until all drain; those without packets have trained nothing more.
    """

    rank: int
    own: Coded
    packets: Mapping[int, Packets]
    total: Tensor | None = None
    draining: Sequence[int] = ()

    @property
    def ranks(self) -> list[int]:
        """All ranks in ascending order."""
        return sorted((self.rank, *self.packets))

    @property
    def senders(self) -> list[int]:
        """The ranks that posted values, in ascending order: all but some that drain."""
        idle = [r for r in self.draining if not (self.own if r == self.rank else self.packets[r])]
        return [rank for rank in self.ranks if rank not in idle]


@dataclass(frozen=True)
class _Posted:
    """What this rank posted: the head of its message, and its values, coded or as they are."""

    head: ExchangeMessage
    coded: Coded = ()
    whole: Tensor | None = None
    summed: bool = False


class Transport:
    """Send this replica's messages to all others, and read everybody's.

    ``deadline``: seconds without any data after which a wait for a rank fails. ``sums``: over the same ranks,
    for values that go as they are.
    """

    def __init__(
        self,
        exchange: Exchange,
        controller: Controller,
        tally: ReplicaTally,
        deadline: float,
        sums: Reduction | None = None,
    ) -> None:
        self.controller, self.tally, self.rank = controller, tally, exchange.rank
        self.number = 0  # messages posted
        self._exchange, self._sums, self._deadline = exchange, sums, deadline
        self._own: deque[_Posted] = deque()  # those under way, oldest first

    def __len__(self) -> int:
        return len(self._own)

    @property
    def first(self) -> int:
        """The number of the oldest message under way, or of the next one."""
        return self.number - len(self._own)

    def post(self, message: CodedMessage | None, undoes: bool = False, drains: bool = False) -> None:
        """Send a message; None says that the values are not finite.

        ``undoes``: what was posted since the last step counts for nothing. ``drains``: this rank waits until
        all do.
        """
        packets = () if message is None else message.packets
        head = self.controller.head(packets, message is not None, undoes, drains)
        self._exchange.post(self.number, head.pack())
        self._posted(_Posted(replace(head, packets=()), () if message is None else message.coded))

    def post_whole(self, values: Tensor, finite: bool, undoes: bool = False, keep: bool = False) -> None:
        """Send values as they are, to be summed; ``keep``: until then, should they be sent in vain.

        Values that are not finite go too, so that no rank waits for a sum that is of no use.
        """
        if self._sums is None:
            raise InputError("nothing sums values here; code them")
        self._sums.post(self.number, values)
        head = self.controller.head((), finite, undoes)
        self._exchange.post(self.number, head.pack())
        self._posted(_Posted(head, whole=values if keep and finite else None, summed=True))

    def _posted(self, own: _Posted) -> None:
        self._own.append(own)
        self.number += 1
        self.tally.exchanges += 1

    def oldest(self) -> Arrived:
        """Return what each rank posted in the oldest message under way, and take over the plan in it.

        Errors: ``LinkError`` naming a rank; ``ReplicaNotFinite`` on every rank; ``ThinwireError`` where some
        ranks alone undo.
        """
        number, start = self.first, perf_counter()
        received = self._exchange.collect(number, self._deadline)
        own = self._own.popleft()
        total = self._sums.collect(number, self._deadline) if own.summed and self._sums else None
        self.tally.wait_s += perf_counter() - start
        messages = {rank: ExchangeMessage.unpack(data) for rank, data in received.items()}
        messages = dict(sorted({**messages, self.rank: own.head}.items()))
        undo = [rank for rank, message in messages.items() if message.undoes]
        if 0 < len(undo) < len(messages):
            text = f"before exchange {number + 1} rank {undo} threw the gradients of a pass away"
            text += ", and others did not; let all ranks step and clear gradients after the same passes"
            raise ThinwireError(text)
        self.controller.heard(messages)
        for rank, message in messages.items():
            if not message.finite:
                text = f"what rank {rank} has to send is not finite (exchange {number + 1})"
                raise ReplicaNotFinite(text, own.coded, own.whole)
        packets = {rank: message.packets for rank, message in messages.items() if rank != self.rank}
        draining = [rank for rank, message in messages.items() if message.drains]
        return Arrived(self.rank, own.coded, packets, total, draining)

    def close(self) -> None:
        """Wait a little for what is under way, and send nothing more."""
        self._exchange.close()
        if self._sums is not None:
            self._sums.close()


@dataclass
class ReplicaTally:
    """Counts since they were last taken."""

    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0  # for which coding waited until the device had computed what is coded
    exchanges: int = 0

    def take(self) -> ReplicaTally:
        """Return the counts and begin again."""
        taken = replace(self)
        self.__init__()  # type: ignore[misc]  # all fields to their defaults
        return taken


class ReplicaNotFinite(ThinwireError):
    """A replica has values that are no finite numbers. The text names its rank.

    ``own``, ``whole``: what this rank sent in that exchange, coded or as it is, which no rank applies.
    """

    def __init__(self, text: str, own: Coded = (), whole: Tensor | None = None) -> None:
        super().__init__(text)
        self.own, self.whole = own, whole
