"""What a host knows of one client's connection: what is under way to it and from it, and how fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from thinwire.types import PayloadError, require
from thinwire.uses.federated.choosing.device import Device
from thinwire.uses.federated.message import Held, Version
from thinwire.uses.federated.remote.pieces import Receiving, Sending
from thinwire.uses.federated.remote.words import positive, whole

CHANGED = 1.25  # a speed that differs by this factor is another one: assignments are made again


@dataclass
class Seat:
    """One client, as it said last, and its turn. ``peer``: the hub's name of its connection."""

    client: int
    peer: bytes
    device: Device
    held: Held | None = None
    after: int = 0  # sequence number of its last update
    there: bool = True  # connected, and willing
    moved: float = 0.0  # when its turn went on last, monotonic seconds
    version: Version | None = None  # under way: given, and not answered yet
    down: Sending | None = None
    up: Receiving | None = None

    @property
    def sequence(self) -> int:
        """The number of the update that is to come; 0 for none."""
        return self.version.sequence if self.version is not None else 0

    def end_turn(self) -> None:
        """Nothing is under way any more."""
        self.version = self.down = self.up = None


@dataclass(frozen=True)
class Hello:
    """How a client says that it is there, and where it stands."""

    client: int
    device: Device
    held: Held | None
    after: int
    trained: int  # the sequence number of the version that is here whole
    partial: int  # of the one of which ``have`` bytes are here
    have: int

    @classmethod
    def of(cls, values: dict[str, Any], up: float) -> Hello:
        """Read one; ``up``: bytes/s at which its probe came. Errors: ``PayloadError``."""
        client, samples = whole(values, "client"), whole(values, "samples")
        require(samples > 0, PayloadError, f"client {client} has no samples; give it some data")
        step, down, delay = (positive(values, name) for name in ("step_seconds", "down", "delay"))
        timed = step < math.inf and delay < math.inf
        require(timed, PayloadError, f"client {client} does not say how long a step and the way take")
        device = Device(client, step, samples, up, down, delay)
        held = values.get("held")
        pair = isinstance(held, list) and len(held) == 2 and all(isinstance(x, int) and x >= 0 for x in held)
        require(held is None or pair, PayloadError, f"client {client} holds {ascii(held)[:40]}, no version")
        stands = (whole(values, name) for name in ("after", "trained", "partial", "have"))
        return cls(client, device, Held(*held) if held else None, *stands)


def differs(a: float, b: float) -> bool:
    """Return whether two speeds are so far apart that assignments are to be made again.

    >>> differs(1.0, 1.1), differs(1.0, 2.0), differs(math.inf, 1.0)
    (False, True, True)
    """
    low, high = min(a, b), max(a, b)
    return low < math.inf and high > CHANGED * low
