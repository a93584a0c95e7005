"""What replicas send each other: posted at once, read in the order of posting."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from thinwire.collectives import Exchange
from thinwire.types import ThinwireError
from thinwire.uses.training.replicas.controller import Controller, ExchangeMessage

Packets = Sequence[bytes | memoryview]


class Transport:
    """Send this replica's messages to all others, and read everybody's, this replica's own among them.

    ``deadline``: seconds without any data after which a wait for a rank fails.
    """

    def __init__(
        self, exchange: Exchange, controller: Controller, tally: ReplicaTally, deadline: float
    ) -> None:
        self.controller, self.tally, self.rank = controller, tally, exchange.rank
        self.number = 0  # messages posted
        self._exchange, self._deadline = exchange, deadline
        self._own: deque[bytes] = deque()  # those under way, oldest first

    def __len__(self) -> int:
        return len(self._own)

    @property
    def first(self) -> int:
        """The number of the oldest message under way, or of the next one."""
        return self.number - len(self._own)

    def post(self, packets: Sequence[bytes] | None, undoes: bool = False) -> None:
        """Send the packets; None says that the values are not finite.

        ``undoes``: what was posted since the last step counts for nothing.
        """
        data = self.controller.head(packets or (), packets is not None, undoes).pack()
        self._exchange.post(self.number, data)
        self._own.append(data)
        self.number += 1
        self.tally.exchanges += 1

    def oldest(self) -> dict[int, Packets]:
        """Return what each rank posted in the oldest message under way, and take over the plan in it.

        Errors: ``LinkError`` naming a rank; ``ReplicaNotFinite`` on every rank; ``ThinwireError`` where some
        ranks alone undo.
        """
        number, start = self.first, perf_counter()
        received = self._exchange.collect(number, self._deadline)
        self.tally.wait_s += perf_counter() - start
        received[self.rank] = self._own.popleft()
        messages = {rank: ExchangeMessage.unpack(data) for rank, data in sorted(received.items())}
        undo = [rank for rank, message in messages.items() if message.undoes]
        if 0 < len(undo) < len(messages):
            text = f"before exchange {number + 1} rank {undo} threw the gradients of a pass away"
            text += ", and others did not; let all ranks step and clear gradients after the same passes"
            raise ThinwireError(text)
        self.controller.heard(messages)
        own = messages[self.rank].packets
        for rank, message in messages.items():
            if not message.finite:
                text = f"what rank {rank} has to send is not finite (exchange {number + 1})"
                raise ReplicaNotFinite(text, own)
        return {rank: message.packets for rank, message in messages.items()}

    def close(self) -> None:
        """Wait a little for what is under way, and send nothing more."""
        self._exchange.close()


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

    ``own``: what this rank sent in that exchange, which no rank applies.
    """

    def __init__(self, text: str, own: Packets = ()) -> None:
        super().__init__(text)
        self.own = own
