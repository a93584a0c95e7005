"""A replica's coder: flat parameters to packets and back, on the device where the parameters are.

A rank keeps the payloads of its own messages where they were made, and decodes those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from time import perf_counter

import torch
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import Scheme
from thinwire.channels.entries import Entries
from thinwire.channels.memory import NoMemory, parse_memory
from thinwire.codecs import Codec, InTurn, parse_codec, roundtrip, tuned
from thinwire.codecs.codec import coded_apart, decoded
from thinwire.codecs.matrices.factors import Cut, placed, within
from thinwire.staging import Staged, to_host
from thinwire.types import (
    WRONG_VALUES,
    MissingExtra,
    Mode,
    Packet,
    Payload,
    PayloadError,
    Section,
    TensorSpec,
    require,
)
from thinwire.uses.training.replicas.flat_parameters import FlatParameters, all_finite, divided
from thinwire.uses.training.replicas.transport import Arrived, Coded, CodedMessage, Packets, ReplicaTally
from thinwire.verdicts import Verdicts, deferred

BLOCK = 1 << 22  # values of a packet: what coding holds in memory beside all values is a few times as much
TOGETHER = 8  # packets in one of a card, where it does not matter where one ends: it starts fewer kernels
STAGED = 3 << 26  # bytes that cross between device and host in one copy; of more, several are made
Found = tuple[int, Verdicts]  # about a packet of which rank, and what
Part = tuple[slice, Tensor, Verdicts]  # segments, their values, and what is found about these
Means = tuple[slice, Tensor, Tensor]  # segments, their mean over all ranks, and what this one sent
Values = Callable[[slice], Tensor]


class Coder:
    """Code for all ranks and keep what was dropped; decode what each sent, to the same bits on all ranks.

    ``shape`` [n, N]: segments of the flat parameters, and values in each; ``matrices``: of all of them, which
    some codecs see. What is kept stays on ``device``, by the segments of a packet and in the form of the
    scheme's references.
    """

    def __init__(
        self,
        scheme: Scheme,
        shape: tuple[int, int],
        tally: ReplicaTally,
        device: torch.device | str = "cpu",
        matrices: Cut = (),
    ) -> None:
        self.scheme = scheme
        self._shape, self._tally, self._device = shape, tally, torch.device(device)
        joins = self._device.type != "cpu" and BLOCK % shape[1] == 0 and coded_apart(scheme.codec, BLOCK)
        self.blocks = list(blocks(shape, TOGETHER if joins else 1))
        self._entries = [_entries(rows) for rows in self.blocks]
        self._matrices, self._cuts = matrices, dict[tuple[int, int], Cut]()
        self._kept: list[Payload | None] = [None] * len(self.blocks)
        self._decoding: list[Span] = []  # whose seconds nobody has asked the device for yet
        self._messages = 0

    def encode(self, values: Tensor | Values, codec: Codec | None = None) -> CodedMessage | None:
        """Return the message for values [n, N] and what was kept; what the codec drops is kept.

        None where a value is not finite, which the device says along with the packets; then nothing changes.
        ``values`` may also be what returns those of one block after another. Then what is kept is replaced
        as it goes, and after None nothing is kept any more.
        """
        codec = codec or self.scheme.codec
        if isinstance(codec, InTurn):
            codec = replace(codec, at=self._messages % codec.every)
        start, span, message = perf_counter(), Span(self._device), _Outgoing()
        try:
            with deferred() as message.verdicts:
                kept = list(self._kept) if isinstance(values, Tensor) else self._kept
                for k, rows in enumerate(self.blocks):
                    x = values[rows] if isinstance(values, Tensor) else values(rows)
                    kept[k] = self._code(x, k, codec, message)
            found = message.arrived(span)
        except WRONG_VALUES:
            if message.is_finite():  # what is not, most codecs refuse
                raise
            found = None
        if found is None:
            self._kept = self._kept if isinstance(values, Tensor) else [None] * len(self.blocks)
            return None
        arrived = perf_counter()
        packets = [wire.pack(self._packet(k, repr(c), p)) for k, (c, p) in enumerate(found)]
        self._kept, self._messages = kept, self._messages + 1
        self._tally.encode_s += span.seconds() + perf_counter() - arrived
        self._tally.compute_s += max(0.0, arrived - start - span.seconds())  # nothing on a CPU
        self._count_decoding()
        return CodedMessage(packets, message.coded)

    def add_kept(self, flat: Tensor) -> bool:
        """Add what was kept to ``flat`` [n, N], which goes as it is, so that nothing is kept any more.

        Return whether all of it is finite; where not, nothing changes but ``flat``.
        """
        start = perf_counter()
        for rows, before in zip(self.blocks, self._kept, strict=True):
            if before is not None:
                y = self.scheme.memory.residual(flat[rows], self.scheme.references.decode(before))
                flat[rows] = y
        finite = bool(all_finite(flat))
        self._tally.compute_s += 0.0 if self._device.type == "cpu" else perf_counter() - start
        if not finite:
            return False
        self._kept, self._messages = [None] * len(self.blocks), self._messages + 1
        return True

    def _code(self, x: Tensor, k: int, codec: Codec, message: _Outgoing) -> Payload | None:
        """Add the packet of some segments to a message; return what is kept of them."""
        memory, before, codec = self.scheme.memory, self._kept[k], self._placed(codec, self.blocks[k])
        s = None if before is None else self.scheme.references.decode(before)
        y = memory.residual(x, s)
        message.look(y)
        if isinstance(memory, NoMemory):
            message.add(codec, codec.encode(y))
            return None
        codec = tuned(codec, x)
        payload, y_hat = roundtrip(codec, y)
        message.add(codec, payload)
        state = memory.advance(memory.restore(y_hat, s), s, y)
        return None if state is None else self.scheme.references.encode(state)

    def _packet(self, k: int, codec: str, payload: Payload) -> Packet:
        keeps = not isinstance(self.scheme.memory, NoMemory)
        references = repr(self.scheme.references) if keeps else "Raw()"
        section = Section(Mode.DIRECT, codec, payload)
        return Packet(payload.spec, repr(self.scheme.memory), references, self._entries[k], (section,))

    def mean(self, arrived: Arrived) -> Tensor:
        """Return the mean [n, N] of what every rank sent, the same bits on all of them."""
        if arrived.total is not None:
            return divided(arrived.total.view(self._shape), len(arrived.ranks))
        total = torch.empty(self._shape, device=self._device)
        for rows, mean, _ in self.means(arrived):
            total[rows] = mean
        return total

    def means(self, arrived: Arrived) -> Iterator[Means]:
        """Yield segments, the mean of what every rank sent of these, and what this one did, to be read alone.

        The means are the same bits on all ranks. What a device finds wrong with a packet is raised behind the
        last segments. Errors: ``PayloadError`` naming a rank.
        """
        span, found = Span(self._device), list[Found]()
        there = _Unpacked(arrived, self._opened)
        streams = [
            self._own(arrived.own) if rank == arrived.rank else self._received(rank, there.of(rank))
            for rank in arrived.senders
        ]
        mine = arrived.senders.index(arrived.rank) if arrived.rank in arrived.senders else None
        for rows, parts in _together(streams, arrived.senders, self._shape[0], found):
            total = parts[0] + parts[1] if len(parts) > 1 else parts[0].clone()
            for values in parts[2:]:  # by rank: the order of a sum decides its last bits
                total.add_(values)
            said = torch.zeros_like(total) if mine is None else parts[mine]
            yield rows, divided(total, len(arrived.ranks)), said
        span.end()
        _settle(found)
        self._decoding.append(span)
        if self._device.type == "cpu":
            self._count_decoding()

    def of(self, own: Coded) -> Tensor:
        """Return the values [n, N] of a message of this rank."""
        return self.mean(Arrived(0, own, {}))

    def _opened(self, packets: Packets) -> Iterator[Packet]:
        """Yield packets, on the device."""
        most = TensorSpec((max(1, BLOCK * TOGETHER // self._shape[1]), self._shape[1])).nbytes
        for batch in _batches(packets, 0 if self._device.type == "cpu" else STAGED):
            yield from wire.unpack_all(batch, most, self._device)

    def _own(self, coded: Coded) -> Iterator[Part]:
        for rows, (codec, payload) in zip(self.blocks, coded, strict=True):
            with deferred() as verdicts:
                values = decoded(codec, payload)
            yield rows, values, verdicts

    def _received(self, rank: int, packets: Iterable[Packet]) -> Iterator[Part]:
        """Yield what the packets of a message hold: all segments in their order, however they are cut."""
        at = 0
        for packet in packets:
            keys = Entries.of(packet.entries).keys
            rows = slice(at, at + len(keys))
            fits = keys == list(range(rows.start, rows.stop)) and rows.stop <= self._shape[0]
            fits = fits and packet.spec.shape == (len(keys), self._shape[1]) and len(packet.sections) == 1
            require(fits, PayloadError, f"rank {rank} sent other segments than those from {at} on")
            values, verdicts = self._decoded(rank, packet, rows)
            yield rows, values, verdicts
            at = rows.stop
        wrong = f"rank {rank} sent {at} segments, not {self._shape[0]}"
        require(at == self._shape[0], PayloadError, wrong)

    def _decoded(self, rank: int, packet: Packet, rows: slice) -> tuple[Tensor, Verdicts]:
        """Return the values of one packet, and what the device finds about them."""
        wrong = f"rank {rank} sent a packet under {packet.memory[:40]}, which would leave state"
        require(not parse_memory(packet.memory).mirrored, PayloadError, wrong)
        section = packet.sections[0]
        with deferred() as verdicts, _named(rank):
            codec = self._placed(parse_codec(section.codec), rows)
            return decoded(codec, section.payload), verdicts

    def _placed(self, codec: Codec, rows: slice) -> Codec:
        """Return ``codec`` as it codes these segments: some codecs see the matrices in them."""
        where = rows.start, rows.stop
        if where not in self._cuts:
            self._cuts[where] = within(self._matrices, *(self._shape[1] * row for row in where))
        return placed(codec, self._cuts[where])

    def _count_decoding(self) -> None:
        self._tally.decode_s += sum(span.seconds() for span in self._decoding)
        self._decoding.clear()

    def revert(self) -> Callable[[], None]:
        """Return what makes this coder forget what it encodes from here on, but not that it did."""
        kept = self._kept

        def back() -> None:
            self._kept = kept

        return back

    def state_dict(self, flat: FlatParameters) -> dict[str, Tensor]:
        """Return what was dropped and is still to be sent, by parameter; nothing where none is kept."""
        held = {"messages": torch.tensor(self._messages, device="cpu")}
        began = self._messages > 0 or self._kept[0] is not None
        if isinstance(self.scheme.memory, NoMemory) or not began:
            return held
        if self._kept[0] is None:  # all went as it was
            return held | flat.named(torch.zeros(self._shape, device="cpu"), "residual.")
        kept = [self.scheme.references.decode(x) for x in self._kept if x is not None]
        return held | flat.named(torch.cat(to_host(kept).tensors()).view(self._shape), "residual.")

    def load_state_dict(self, flat: FlatParameters, state: Mapping[str, Tensor]) -> None:
        """Load what ``state_dict`` returned, whatever the width of the segments was."""
        self._messages = int(state["messages"])
        remembers = self._messages > 0 and not isinstance(self.scheme.memory, NoMemory)
        if not remembers and not any(name.startswith("residual.") for name in state):
            return
        whole = flat.saved(state, "residual.")
        self._kept = [self.scheme.references.encode(whole[rows]) for rows in self.blocks]


def blocks(shape: tuple[int, int], packets: int = 1) -> Iterator[slice]:
    """Return the segments of each packet of flat parameters [n, N]; ``packets``: so many are one."""
    rows, width = shape
    many = max(1, BLOCK * packets // width)
    return (slice(i, min(i + many, rows)) for i in range(0, rows, many))


def _entries(rows: slice) -> Entries:
    zeros = [0] * (rows.stop - rows.start)
    return Entries(list(range(rows.start, rows.stop)), zeros, zeros, zeros)


class _Outgoing:
    """The payloads of a message on their way to the host, and whether what they stand for is finite."""

    def __init__(self) -> None:
        self.verdicts = Verdicts()
        self.coded: list[tuple[Codec, Payload]] = []
        self._bounds: list[Tensor] = []  # lowest and highest of the values of each payload
        self._parts: list[Tensor] = []  # not under way yet
        self._nbytes = 0
        self._staged: list[Staged] = []

    def look(self, values: Tensor) -> None:
        """Let the device look at values that are to be coded."""
        self._bounds += torch.aminmax(values)  # a NaN is both

    def add(self, codec: Codec, payload: Payload) -> None:
        """Add a payload."""
        self.coded.append((codec, payload))
        self._parts += payload.parts
        self._nbytes += payload.nbytes
        if self._nbytes >= STAGED:
            self._send()

    def arrived(self, span: Span) -> list[tuple[Codec, Payload]] | None:
        """End ``span`` with what is queued; wait, and return ``coded`` on the host. None: not finite."""
        said = _Words([self._verdict(), *self.verdicts.tensors()])
        self._parts += said.parts
        self._send()
        span.end()
        there = [x for staged in self._staged for x in staged.tensors()]
        finite, *read = said.apart(there[-len(said.parts) :])
        if not finite:
            return None
        self.verdicts.settle(read)
        parts = iter(there)
        return [(c, Payload(p.spec, tuple([next(parts) for _ in p.parts]))) for c, p in self.coded]

    def is_finite(self) -> bool:
        """Wait, and return whether what was looked at is finite."""
        return not self._bounds or bool(self._verdict())

    def _verdict(self) -> Tensor:
        return torch.stack(self._bounds).isfinite().all()

    def _send(self) -> None:
        self._staged.append(to_host(self._parts))
        self._parts, self._nbytes = [], 0


class _Words:
    """What a device says, a value each: put together by dtype, as each part of a copy takes its time."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._dtypes = [x.dtype for x in values]
        self.parts = [torch.stack([x for x in values if x.dtype == d]) for d in dict.fromkeys(self._dtypes)]

    def apart(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the values again, from where the parts were copied to."""
        each = {part.dtype: iter(part.unbind()) for part in parts}
        return [next(each[dtype]) for dtype in self._dtypes]


class Span:
    """Seconds of work on ``device``, from its making to ``end``: a card's own, without what it did before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun = self._ended = self._now()

    def end(self) -> None:
        """End it with what is queued."""
        self._ended = self._now()

    def seconds(self) -> float:
        """Return the seconds; wait for the end."""
        if isinstance(self._begun, float) or isinstance(self._ended, float):
            return float(self._ended) - float(self._begun)  # type: ignore[arg-type]
        self._ended.synchronize()
        return float(self._begun.elapsed_time(self._ended)) / 1e3

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class _Unpacked:
    """The packets of all other ranks, unpacked as they are needed: those of the first segments first."""

    def __init__(self, arrived: Arrived, opened: Callable[[Packets], Iterator[Packet]]) -> None:
        many = {rank: len(packets) for rank, packets in arrived.packets.items()}
        order = sorted((k / many[rank], rank, k) for rank in many for k in range(many[rank]))
        self._ranks = iter([rank for _, rank, _ in order])
        self._packets = opened([arrived.packets[rank][k] for _, rank, k in order])
        self._waiting: dict[int, deque[Packet]] = {rank: deque() for rank in many}

    def of(self, rank: int) -> Iterator[Packet]:
        """Yield the packets of a rank."""
        own = self._waiting[rank]
        while True:
            while not own:
                owner = next(self._ranks, None)
                if owner is None:
                    return
                self._waiting[owner].append(next(self._packets))
            yield own.popleft()


def _together(
    streams: Sequence[Iterator[Part]], ranks: Sequence[int], end: int, found: list[Found]
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield segments and what each rank has of them, however they are cut; add what is found about these."""
    parts: list[tuple[slice, Tensor]] = [(slice(0, 0), torch.empty(0, device="cpu"))] * len(streams)
    at = 0
    while at < end:
        for k, stream in enumerate(streams):
            if parts[k][0].stop == at:
                rows, values, verdicts = next(stream)
                parts[k] = rows, values
                found.append((ranks[k], verdicts))
        stop = min(rows.stop for rows, _ in parts)
        yield slice(at, stop), [values[at - rows.start : stop - rows.start] for rows, values in parts]
        at = stop
    for stream in streams:
        next(stream, None)  # a packet too many is refused


def _batches(packets: Packets, most: int) -> Iterator[Packets]:
    """Yield packets in batches of about ``most`` bytes, which cross in one copy each."""
    start = nbytes = 0
    for k, packet in enumerate(packets):
        nbytes += len(packet)
        if nbytes >= most:
            yield packets[start : k + 1]
            start, nbytes = k + 1, 0
    if start < len(packets):
        yield packets[start:]


def _settle(found: Sequence[Found]) -> None:
    """Wait for what the device found about packets. Errors: ``PayloadError`` naming a rank."""
    said = _Words([x for _, verdicts in found for x in verdicts.tensors()])
    if not said.parts:
        return
    read = iter(said.apart(to_host(said.parts).tensors()))
    for rank, verdicts in found:
        with _named(rank):
            verdicts.settle(list(islice(read, len(verdicts.tensors()))))


@contextmanager
def _named(rank: int) -> Iterator[None]:
    """Raise whatever a hostile packet of ``rank`` trips over as a ``PayloadError``."""
    try:
        yield
    except MissingExtra:
        raise
    except WRONG_VALUES as e:
        raise PayloadError(f"a packet of rank {rank} does not decode: {e}") from e
