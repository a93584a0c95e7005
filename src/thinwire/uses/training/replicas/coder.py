"""Code the segments of a table for all other replicas, and decode what each of them sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.memory import NoMemory
from thinwire.codecs import Codec, InTurn
from thinwire.types import PayloadError, TensorSpec, require
from thinwire.uses.training.replicas.table import Table
from thinwire.uses.training.replicas.tally import Tally

BLOCK = 1 << 22  # values of a packet: what coding holds in memory beside the table is a few times as much


def blocks(shape: tuple[int, int]) -> Iterator[slice]:
    """Return the segments of each packet of a table [n, N]."""
    rows, width = shape
    many = max(1, BLOCK // width)
    return (slice(i, min(i + many, rows)) for i in range(0, rows, many))


class Coder:
    """One sender for this replica, and a receiver for each, this one too: all decode the same bytes alike.

    ``shape`` [n, N]: segments of a table, and values in each.
    """

    def __init__(self, scheme: Scheme, shape: tuple[int, int], ranks: Iterable[int], tally: Tally) -> None:
        self.sender, self._tally = Sender(scheme), tally
        self._receivers = {rank: Receiver() for rank in ranks}
        self._shape = shape
        self._messages = 0

    def encode(self, flat: Tensor, codec: Codec | None = None) -> list[bytes]:
        """Return the packets for ``flat`` [n, N]; what the codec drops stays with the sender's memory."""
        start, codec = perf_counter(), codec or self.sender.scheme.codec
        if isinstance(codec, InTurn):
            codec = replace(codec, at=self._messages % codec.every)
        self._messages += 1
        packets = [
            wire.pack(self.sender.encode(flat[rows], range(rows.start, rows.stop), codec=codec)[0])
            for rows in blocks(self._shape)
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
        parts = list(blocks(self._shape))
        wrong = f"rank {rank} sent {len(packets)} packets, not {len(parts)}"
        require(len(packets) == len(parts), PayloadError, wrong)
        for rows, data in zip(parts, packets, strict=True):
            part = total[rows]
            packet = wire.unpack(data, max_nbytes=4 * part.numel())
            keys = [entry.key for entry in packet.entries]
            fits = keys == list(range(rows.start, rows.stop))
            require(
                fits, PayloadError, f"rank {rank} sent other segments than {rows.start} to {rows.stop - 1}"
            )
            part.add_(self._receivers[rank].decode(packet, expect=TensorSpec.of(part)))

    def revert(self) -> Callable[[], None]:
        """Return what makes this coder forget what it encodes from here on, but not that it did."""
        if self.sender.scheme.memory.mirrored:
            return lambda: None  # the others decode it too, so nothing is lost
        return partial(self.sender.take_back, self.sender.held())

    def state_dict(self, table: Table) -> dict[str, Tensor]:
        """Return what was dropped and is still to be sent, by parameter; nothing where none is kept."""
        state = self.sender.state_dict()
        rows = [state[f"{k}.0"] for k in range(self._shape[0]) if f"{k}.0" in state]
        held = {"messages": torch.tensor(self._messages)}
        if len(rows) < self._shape[0]:
            return held
        return held | table.named(torch.cat(rows).view(self._shape), "residual.")

    def load_state_dict(self, table: Table, state: Mapping[str, Tensor]) -> None:
        """Load what ``state_dict`` returned, whatever the width of the segments was."""
        self._messages = int(state["messages"])
        remembers = self._messages > 0 and not isinstance(self.sender.scheme.memory, NoMemory)
        if not remembers and not any(name.startswith("residual.") for name in state):
            return
        shape = torch.tensor([1, self._shape[1]])
        held: dict[str, Tensor] = {"versions": torch.tensor([[k, 1] for k in range(self._shape[0])])}
        for k, row in enumerate(table.saved(state, "residual.")):
            held |= {f"{k}.shape": shape, f"{k}.0": row}
        self.sender.load_state_dict(held)
