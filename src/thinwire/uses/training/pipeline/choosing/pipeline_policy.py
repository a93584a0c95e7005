"""What a policy of pipelines decides about, and what it chooses: directions of stage boundaries, codecs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from thinwire.choosing.policy import Policy
from thinwire.codecs import Codec

FORWARD, BACKWARD = "forward", "backward"  # the roles of a pipeline's recipes


@dataclass(frozen=True)
class BoundarySite:
    """One direction of a stage boundary: what crosses it in a step, and what was measured there.

    ``None`` stands for what nobody has measured yet. ``rung`` and ``streak`` are what the last choice said,
    so that a policy needs no memory of its own.

    >>> BoundarySite(sender=1, receiver=0, values=1 << 18, messages=4).name
    '0-1 backward'
    """

    sender: int  # stage
    receiver: int  # stage
    values: int  # a step
    messages: int  # a step: micro-batches
    rate: float | None = None  # bytes/s of the link from sender to receiver
    rtt: float | None = None  # seconds, queues left out
    age: float | None = None  # seconds since rate and round trip were measured
    sender_s: float | None = None  # compute seconds a step of the sending stage
    receiver_s: float | None = None  # the same of the receiving one
    restarts: bool = False  # whether the sender's TCP begins with a small window after each pause
    fresh: float = 0.0  # share of the values that are first visits, 0 to 1
    bits: float | None = None  # bits a value that the choice in use really took; as foretold while it is new
    rung: int | None = None  # of the choice in use
    streak: int = 0  # decisions in a row for which a finer rung would have fitted; -1: nothing known yet

    @property
    def is_forward(self) -> bool:
        """Whether activations cross here; gradients otherwise."""
        return self.receiver > self.sender

    @property
    def boundary(self) -> int:
        """The stage before the boundary."""
        return min(self.sender, self.receiver)

    @property
    def name(self) -> str:
        """Boundary and direction, as in the run record."""
        way = FORWARD if self.is_forward else BACKWARD
        return f"{self.boundary}-{max(self.sender, self.receiver)} {way}"


@dataclass(frozen=True)
class Choice:
    """How a site sends from now on, and why."""

    codec: Codec  # for residuals under a memory, for plain values otherwise
    keyframe: Codec | None = None  # for first visits under a mirrored memory
    direct: bool = False  # past any memory: plain values, no reference moves
    rung: int = 0
    bits: float = 32.0  # a value, expected
    streak: int = 0  # to be handed back with the next site
    why: Callable[[], str] = field(default=str, compare=False, repr=False)

    @property
    def reason(self) -> str:
        """Why, in one clause; worked out when asked for, which can take longer than the decision did."""
        return self.why()


class PipelinePolicy(Policy[BoundarySite, Choice], Protocol):
    """A policy that knows by which schedule the pipeline runs. The sites of one call are one pipeline's."""

    def under(self, schedule: str) -> PipelinePolicy:
        """Return this policy for a pipeline that runs by ``schedule``."""
        ...
