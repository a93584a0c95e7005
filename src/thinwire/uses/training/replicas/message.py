"""The message of one exchange: a small head, then packets that describe themselves. Little-endian::

version u8 (1), state u8 (0: values follow; 1: the sender's values are not finite; 2 more: the sender
takes back what it sent since its last step), packets u16
what rank 0 plans: staleness u16, local steps u16 (others repeat what holds)
what the sender measured, NaN where it did not yet: seconds of compute a step and of coding an exchange,
bytes/s of its uplink, seconds of one way, f32 each
each packet: length u32, bytes as ``channels/wire.py`` has them
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.collectives.framing import Framing

MESSAGES = Framing(version=1, states=4, fields="HH4f")


@dataclass(frozen=True)
class Measured:
    """What a replica knows of its own speed: seconds a step and a coding, bytes/s and seconds of its link."""

    compute: float = math.nan
    coding: float = math.nan
    rate: float = math.nan
    delay: float = math.nan


@dataclass(frozen=True)
class Message:
    """What one replica tells the others in one exchange."""

    staleness: int
    local_steps: int
    measured: Measured
    packets: Sequence[bytes | memoryview] = ()
    finite: bool = True
    undoes: bool = False

    def pack(self) -> bytes:
        """Return the message as bytes."""
        m = self.measured
        state = (not self.finite) + 2 * self.undoes
        measured = m.compute, m.coding, m.rate, m.delay
        return MESSAGES.pack(state, self.packets, self.staleness, self.local_steps, *measured)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Message:
        """Read what ``pack`` wrote; ``PayloadError`` for anything else."""
        state, packets, (staleness, local_steps, *measured) = MESSAGES.unpack(data)
        return cls(staleness, local_steps, Measured(*measured), packets, not state & 1, state > 1)
