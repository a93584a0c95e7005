"""A message of one rank to another: what it is about, and how it lies in bytes.

A message is a small head, then packets that describe themselves. Little-endian::

    version u8 (2), state u8 (0: packets follow; 1: the sender makes no more calls, and a packet may say why),
    packets u16
    key u64: what is exchanged, as ``Key`` packs it; inputs u32: a checksum of the call's inputs; where state
    is 1, key is 1 + the rank that the sender waited for in vain, or 0
    each packet: length u32, bytes as ``channels/wire.py`` has them
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from thinwire.collectives.exchange import LENGTH, Framing
from thinwire.types import InputError, LinkError, Packet, PayloadError, require
from thinwire.uses.pictures.message_bytes import Data, device_of, packing

Packets = Sequence[Packet | Data]  # to be sent

_LAYER, _TENSOR, _SOURCE = 16, 8, 16  # bits


class TensorKind(IntEnum):
    """What is exchanged."""

    KEYS = 0
    VALUES = 1
    OUTPUT = 2
    MASK = 3
    QUERIES = 4
    HIDDEN = 6
    FOUND = 5  # what attention returns
    TOKENS = 7  # to experts
    MADE = 8  # by experts
    CHOICES = 9  # which experts are meant


_KINDS = frozenset(TensorKind)


class Key(NamedTuple):
    """What a reference belongs to. ``layer`` counts the exchanges of a call of the model.

    >>> hex(Key(stream=1, layer=7, kind=TensorKind.VALUES, source=2).pack())
    '0x10007010002'
    """

    stream: int
    layer: int
    kind: TensorKind
    source: int

    def pack(self) -> int:
        """Return the key as ``Sender`` and ``Receiver`` take it."""
        return ((self.stream << _LAYER | self.layer) << _TENSOR | self.kind) << _SOURCE | self.source


MESSAGES = Framing(version=2, states=2, fields="QI")


@dataclass(frozen=True)
class RankMessage:
    """What one rank tells the others in one exchange."""

    key: int = 0
    inputs: int = 0
    packets: Packets = ()
    stopped: bool = False

    @property
    def kind(self) -> TensorKind | None:
        """What is exchanged, as far as this version knows it."""
        number = self.key >> _SOURCE & (1 << _TENSOR) - 1
        return TensorKind(number) if number in _KINDS else None

    @property
    def data(self) -> list[Data]:
        """The packets of a message that was read."""
        return [packet for packet in self.packets if not isinstance(packet, Packet)]

    @classmethod
    def stop(cls, cause: BaseException | None = None, waited: int | None = None) -> RankMessage:
        """Return what says that the sender makes no more calls: why, and for which rank it waited in vain."""
        told = isinstance(cause, InputError)
        return cls(0 if waited is None else waited + 1, 0, [json.dumps(str(cause)).encode()] * told, True)

    def check_sender(self, rank: int) -> None:
        """Raise ``LinkError`` if the sender, of this rank, makes no more calls.

        Errors: ``InputError`` in its own words, if it has been given what no rank can take.
        """
        if not self.stopped:
            return
        if self.data:
            raise InputError(_said(rank, bytes(self.data[0])))
        text = f"rank {rank} has left, or ended with an error; see what it says, and make as many calls there"
        if self.key:
            text = (
                f"rank {rank} waited in vain for rank {self.key - 1}, and has ended; see what happened there"
            )
        raise LinkError(text)

    def pack(self) -> Data:
        """Return the message as bytes; one packet of a device is left in the memory that it was copied to."""
        return self.packing()()

    def packing(self) -> Callable[[], Data]:
        """Begin to pack the message, as ``packing`` of packets; return what waits for it."""
        alone = len(self.packets) == 1 and device_of(self.packets).type != "cpu"
        lead = MESSAGES.size + LENGTH.size if alone else 0
        begun = packing(self.packets, lead)

        def wait() -> Data:
            data: list[Any] = begun()
            if not alone:
                return MESSAGES.pack(self.stopped, data, self.key, self.inputs)
            [body] = data
            body[:lead] = MESSAGES.before(self.stopped, len(body) - lead, self.key, self.inputs)
            return body

        return wait

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> RankMessage:
        """Read what ``pack`` wrote; ``PayloadError`` for anything else."""
        state, packets, (key, inputs) = MESSAGES.unpack(data)
        return cls(key, inputs, packets, bool(state))


def _said(rank: int, packet: bytes) -> str:
    """Return the sentence by which a rank stopped, with the number of the first one that said it."""
    try:
        text = json.loads(packet)
    except ValueError:
        text = None
    require(isinstance(text, str), PayloadError, f"rank {rank} has stopped, and cannot be read why")
    return text if text.startswith("rank ") else f"rank {rank}: {text}"
