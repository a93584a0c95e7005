"""The packets of a message on their way between a device and the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.channels import wire
from thinwire.types import Packet

Data = bytes | memoryview
_CPU = torch.device("cpu")
UNBOUNDED = 1 << 62  # bytes: opening allocates nothing that a packet claims, and who reads it checks shapes


def device_of(packets: Sequence[Packet | Data]) -> torch.device:
    """Return where the parts of a message's packets are; bytes are on the host."""
    for packet in packets:
        for section in packet.sections if isinstance(packet, Packet) else ():
            for part in section.payload.parts:
                return part.device
    return _CPU


def packed(packets: Sequence[Packet | Data]) -> list[Data]:
    """Return the packets of a message as bytes: one copy from their device for each, and one wait for it.

    They have no check sums: the link that carries them has.
    """
    return [wire.packed(packet, summed=False) if isinstance(packet, Packet) else packet for packet in packets]


def opened(data: Sequence[Data], device: torch.device) -> list[Packet | None]:
    """Return the packets of a message, each on ``device`` in one copy. What is empty is none.

    Errors: ``PayloadError``. Their shapes are yet to be checked.
    """
    return [wire.unpack(each, UNBOUNDED, device, summed=False) if len(each) else None for each in data]
