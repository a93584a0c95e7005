"""What a server knows of its clients: who they are, what each was given and what was taken from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from thinwire.uses.federated.choosing.device import Device


@dataclass
class Traffic:
    """Bytes between the server and one client, and what the same would be uncompressed; counts of updates."""

    up: int = 0
    down: int = 0
    raw_up: int = 0
    raw_down: int = 0
    updates: int = 0  # taken
    refused: int = 0
    staleness: int = 0  # of all that were taken, together


@dataclass
class Member:
    """One client. ``present``: policies weigh it, and rounds may ask it."""

    device: Device
    present: bool = True
    issued: int = 0  # sequence number of what it was given last
    started: int = 0  # the version that this was
    confirmed: int = 0  # sequence number of its last update that was taken
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def owes(self) -> bool:
        """Whether an update is to come from it."""
        return self.issued > self.confirmed

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Member:
        """Return the member that ``to_dict`` described."""
        values = values | {"device": Device(**values["device"]), "traffic": Traffic(**values["traffic"])}
        return cls(**values)
