"""The packets of a message on their way between a device and the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.channels import wire
from thinwire.types import Packet

Data = bytes | memoryview
UNBOUNDED = 1 << 62  # bytes: opening allocates nothing that a packet claims, and who reads it checks shapes


def device_of(packets: Sequence[Packet | Data]) -> torch.device:
    """Return where the parts of a message's packets are; bytes are on the host."""
    sections = (s for packet in packets if isinstance(packet, Packet) for s in packet.sections)
    return next((p.device for s in sections for p in s.payload.parts), torch.device("cpu"))


def packed(packets: Sequence[Packet | Data]) -> list[Data]:
    """Return the packets of a message as bytes: one copy from their device for each, and one wait for it."""
    return [wire.packed(packet) if isinstance(packet, Packet) else packet for packet in packets]


def opened(data: Sequence[Data], device: torch.device) -> list[Packet | None]:
    """Return the packets of a message, each on ``device`` in one copy. What is empty is none.

    Errors: ``PayloadError``. Their shapes are yet to be checked.
    """
    return [wire.unpack(each, UNBOUNDED, device) if len(each) else None for each in data]
