"""Messages of one exchange after another: posted at once, read in the order in which they were posted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter

from thinwire.collectives import Exchange
from thinwire.types import ThinwireError, require
from thinwire.uses.training.replicas.message import Message
from thinwire.uses.training.replicas.pilot import Pilot
from thinwire.uses.training.replicas.tally import Tally

Packets = Sequence[bytes | memoryview]


class NotFinite(ThinwireError):
    """A replica has values that are no finite numbers. The text names its rank.

    ``own``: what this rank sent in that exchange, which no rank applies.
    """

    def __init__(self, text: str, own: Packets = ()) -> None:
        super().__init__(text)
        self.own = own


class Mail:
    """Send this replica's messages to all others, and read everybody's, this replica's own among them.

    ``deadline``: seconds without any data after which a wait for a rank fails.
    """

    def __init__(self, exchange: Exchange, pilot: Pilot, tally: Tally, deadline: float) -> None:
        self.pilot, self.tally = pilot, tally
        self.number = 0  # messages posted
        self._exchange, self._deadline = exchange, deadline
        self._own: deque[bytes] = deque()  # those under way, oldest first

    @property
    def rank(self) -> int:
        """This rank."""
        return self._exchange.rank

    def __len__(self) -> int:
        return len(self._own)

    @property
    def first(self) -> int:
        """The number of the oldest message under way, or of the next one."""
        return self.number - len(self._own)

    def post(self, packets: Sequence[bytes], finite: bool = True, undoes: bool = False) -> None:
        """Send the packets; values that are not ``finite`` are not sent, but that they are not is.

        ``undoes``: what was posted since the last step counts for nothing.
        """
        data = self.pilot.head(packets if finite else (), finite, undoes).pack()
        self._exchange.post(self.number, data)
        self._own.append(data)
        self.number += 1
        self.tally.exchanges += 1

    def oldest(self) -> dict[int, Packets]:
        """Return what each rank posted in the oldest message under way, and take over the plan in it.

        Errors: ``LinkError`` naming a rank; ``NotFinite`` on every rank for values that are not finite;
        ``ThinwireError`` where some ranks alone undo.
        """
        number, start = self.first, perf_counter()
        received = self._exchange.collect(number, self._deadline)
        self.tally.wait_s += perf_counter() - start
        received[self._exchange.rank] = self._own.popleft()
        messages = {rank: Message.unpack(data) for rank, data in sorted(received.items())}
        _check_undone(messages, number)
        self.pilot.heard(messages)
        own = messages[self._exchange.rank].packets
        for rank, message in messages.items():
            if not message.finite:
                raise NotFinite(f"what rank {rank} has to send is not finite (exchange {number + 1})", own)
        return {rank: message.packets for rank, message in messages.items()}

    def close(self) -> None:
        """Wait a little for what is under way, and send nothing more."""
        self._exchange.close()


def _check_undone(messages: Mapping[int, Message], number: int) -> None:
    undo = [rank for rank, message in messages.items() if message.undoes]
    text = f"before exchange {number + 1} rank {undo} threw the gradients of a pass away, and others did not"
    alike = len(undo) in (0, len(messages))
    require(alike, ThinwireError, f"{text}; let all ranks step and clear gradients after the same passes")
