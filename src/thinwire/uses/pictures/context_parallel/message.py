"""The message of one exchange: a small head, then packets that describe themselves. Little-endian::

version u8 (1), state u8 (0: packets follow; 1: the sender makes no more calls, and a packet may say why),
packets u16
key u64: what is exchanged, as ``keys.py`` packs it; inputs u32: a checksum of the call's inputs; where state
is 1, key is 1 + the rank that the sender waited for in vain, or 0
each packet: length u32, bytes as ``channels/wire.py`` has them
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.collectives.framing import Framing
from thinwire.types import InputError, LinkError, PayloadError, require

MESSAGES = Framing(version=1, states=2, fields="QI")


@dataclass(frozen=True)
class Message:
    """What one rank tells the others in one exchange."""

    key: int = 0
    inputs: int = 0
    packets: Sequence[bytes | memoryview] = ()
    stopped: bool = False

    @classmethod
    def stop(cls, cause: BaseException | None = None, waited: int | None = None) -> Message:
        """Return what says that the sender makes no more calls: why, and for which rank it waited in vain."""
        told = isinstance(cause, InputError)
        return cls(0 if waited is None else waited + 1, 0, [json.dumps(str(cause)).encode()] * told, True)

    def check_sender(self, rank: int) -> None:
        """Raise ``LinkError`` if the sender, of this rank, makes no more calls.

        Errors: ``InputError`` in its own words, if it has been given what no rank can take.
        """
        if self.stopped and self.packets:
            raise InputError(_said(rank, bytes(self.packets[0])))
        text = f"rank {rank} has left, or ended with an error; see what it says, and make as many calls there"
        if self.key:
            text = (
                f"rank {rank} waited in vain for rank {self.key - 1}, and has ended; see what happened there"
            )
        require(not self.stopped, LinkError, text)

    def pack(self) -> bytes:
        """Return the message as bytes."""
        return MESSAGES.pack(self.stopped, self.packets, self.key, self.inputs)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Message:
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


def is_last(data: bytes) -> bool:
    """Return whether the head of a message says that the sender has left, or ended with an error."""
    return bytes(data[1:2]) == b"\1"
