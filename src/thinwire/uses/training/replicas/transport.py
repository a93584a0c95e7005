"""What replicas send each other: coded for all, posted at once, read in the order of posting, decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.memory import NoMemory
from thinwire.codecs import Codec, InTurn
from thinwire.collectives import Exchange
from thinwire.types import PayloadError, TensorSpec, ThinwireError, require
from thinwire.uses.training.replicas.controller import Controller, ExchangeMessage
from thinwire.uses.training.replicas.flat_parameters import FlatParameters

Packets = Sequence[bytes | memoryview]
BLOCK = 1 << 22  # values of a packet: what coding holds in memory beside all values is a few times as much


class Coder:
    """One sender for this replica, and a receiver for each, this one too: all decode the same bytes alike.

    ``shape`` [n, N]: segments of the flat parameters, and values in each.
    """

    def __init__(
        self, scheme: Scheme, shape: tuple[int, int], ranks: Iterable[int], tally: ReplicaTally
    ) -> None:
        self.sender, self._tally = Sender(scheme), tally
        self._receivers = {rank: Receiver() for rank in ranks}
        self._shape, self._blocks = shape, list(blocks(shape))
        self._messages = 0

    def encode(self, flat: Tensor, codec: Codec | None = None) -> list[bytes]:
        """Return the packets for ``flat`` [n, N]; what the codec drops stays with the sender's memory."""
        start, codec = perf_counter(), codec or self.sender.scheme.codec
        if isinstance(codec, InTurn):
            codec = replace(codec, at=self._messages % codec.every)
        self._messages += 1
        packets = [
            wire.pack(self.sender.encode(flat[rows], range(rows.start, rows.stop), codec=codec)[0])
            for rows in self._blocks
        ]
        self._tally.encode_s += perf_counter() - start
        return packets

    def mean(self, packets: Mapping[int, Sequence[bytes | memoryview]]) -> Tensor:
        """Return the mean [n, N] of what every rank sent, the same bits on all of them."""
        start = perf_counter()
        total = torch.zeros(self._shape)
        for rank in sorted(packets):  # the order of a sum decides its last bits
            self._add(rank, packets[rank], total)
        self._tally.decode_s += perf_counter() - start
        return total.div_(len(packets))

    def _add(self, rank: int, packets: Sequence[bytes | memoryview], total: Tensor) -> None:
        wrong = f"rank {rank} sent {len(packets)} packets, not {len(self._blocks)}"
        require(len(packets) == len(self._blocks), PayloadError, wrong)
        for rows, data in zip(self._blocks, packets, strict=True):
            part = total[rows]
            packet = wire.unpack(data, max_nbytes=4 * part.numel())
            keys = [entry.key for entry in packet.entries]
            wrong = f"rank {rank} sent other segments than {rows.start} to {rows.stop - 1}"
            require(keys == list(range(rows.start, rows.stop)), PayloadError, wrong)
            part.add_(self._receivers[rank].decode(packet, expect=TensorSpec.of(part)))

    def revert(self) -> Callable[[], None]:
        """Return what makes this coder forget what it encodes from here on, but not that it did."""
        if self.sender.scheme.memory.mirrored:
            return lambda: None  # the others decode it too, so nothing is lost
        return partial(self.sender.take_back, self.sender.held())

    def state_dict(self, flat: FlatParameters) -> dict[str, Tensor]:
        """Return what was dropped and is still to be sent, by parameter; nothing where none is kept."""
        state = self.sender.state_dict()
        rows = [state[f"{k}.0"] for k in range(self._shape[0]) if f"{k}.0" in state]
        held = {"messages": torch.tensor(self._messages)}
        if len(rows) < self._shape[0]:
            return held
        return held | flat.named(torch.cat(rows).view(self._shape), "residual.")

    def load_state_dict(self, flat: FlatParameters, state: Mapping[str, Tensor]) -> None:
        """Load what ``state_dict`` returned, whatever the width of the segments was."""
        self._messages = int(state["messages"])
        remembers = self._messages > 0 and not isinstance(self.sender.scheme.memory, NoMemory)
        if not remembers and not any(name.startswith("residual.") for name in state):
            return
        shape = torch.tensor([1, self._shape[1]])
        held: dict[str, Tensor] = {"versions": torch.tensor([[k, 1] for k in range(self._shape[0])])}
        for k, row in enumerate(flat.saved(state, "residual.")):
            held |= {f"{k}.shape": shape, f"{k}.0": row}
        self.sender.load_state_dict(held)


def blocks(shape: tuple[int, int]) -> Iterator[slice]:
    """Return the segments of each packet of flat parameters [n, N]."""
    rows, width = shape
    many = max(1, BLOCK // width)
    return (slice(i, min(i + many, rows)) for i in range(0, rows, many))


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

    def post(self, packets: Sequence[bytes], finite: bool = True, undoes: bool = False) -> None:
        """Send the packets; values that are not ``finite`` are not sent, but that they are not is.

        ``undoes``: what was posted since the last step counts for nothing.
        """
        data = self.controller.head(packets if finite else (), finite, undoes).pack()
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
