"""The packets of a message on their way between a device and the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def packing(packets: Sequence[Packet | Data], lead: int = 0) -> Callable[[], list[Data]]:
    """Begin to pack a message, and return what waits for it: its packets as bytes.

    All that is on a device crosses in one copy, behind what this thread has queued there. ``lead``: bytes
    before a packet of a device that is alone. They have no check sums: the link that carries them has.
    """
    begun = wire.packing([p for p in packets if isinstance(p, Packet)], lead, summed=False)

    def wait() -> list[Data]:
        made = iter(begun())
        return [next(made) if isinstance(packet, Packet) else packet for packet in packets]

    return wait


def opened(data: Sequence[Data], device: torch.device) -> list[Packet | None]:
    """Return the packets of a message on ``device``, all in one copy; for one that is empty, None.

    Errors: ``PayloadError``. Their shapes are yet to be checked.
    """
    found = iter(wire.unpack_all([each for each in data if len(each)], UNBOUNDED, device, summed=False))
    return [next(found) if len(each) else None for each in data]
