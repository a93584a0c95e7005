"""What the ranks of a run tell each other beside tensors: step reports, gradient norms, losses.

Rank 0 keeps the recorder. A step's reports are read one step late, so that nobody waits for them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.engines.pipeline.boundary import BACKWARD, FORWARD, Tally
from thinwire.engines.pipeline.stage import CompressedStage
from thinwire.lab.ranks.world import World
from thinwire.links.mailbox import FILLER
from thinwire.types import PayloadError

WAYS = (FORWARD, BACKWARD)
EXCHANGE = "exchange"  # what replicas send each other
STREAMS = (*WAYS, EXCHANGE)


@dataclass
class StepReport:
    """One rank's share of a step: seconds by kind, values and bytes by stream, perhaps the loss."""

    rank: int
    step: int
    loss: float | None = None
    compute_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    exchanges: int = 0
    seconds: float = 0.0  # of the whole step, for this rank's own record
    ended: float = 0.0  # by this rank's clock
    values: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    links: list[dict[str, Any]] = field(default_factory=list)  # LinkMetrics

    def add(self, tally: Tally) -> None:
        """Add what one stage did."""
        for name in ("compute_s", "encode_s", "decode_s", "wait_s"):
            setattr(self, name, getattr(self, name) + getattr(tally, name))
        for way in WAYS:
            self.values[way] += tally.values[way]
            self.bytes[way] += tally.wire_bytes[way]


class Telemetry:
    """Exchange small messages with every other rank, each with a deadline."""

    def __init__(self, world: World, deadline: float) -> None:
        self.world, self._deadline = world, deadline

    def send(self, rank: int, tag: bytes, value: Any) -> None:
        self.world.peers[rank].mailbox.send(tag, json.dumps(value).encode(), "control")

    def working(self) -> None:
        """Let those who wait for this rank know that it is at work: their deadlines begin anew."""
        for peer in self.world.peers.values():
            peer.mailbox.send(FILLER, b"")

    def get(self, rank: int, tag: bytes, what: str) -> Any:
        peers = self.world.peers
        data = peers[rank].get(tag, self._deadline, what, peers.values())
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as e:
            raise PayloadError(f"rank {rank} sent something else than {what}") from e

    def gather(self, tag: bytes, value: Any, what: str) -> list[Any] | None:
        """Send ``value`` to rank 0; there return everybody's, by rank."""
        if self.world.rank:
            self.send(0, tag, value)
            return None
        return [value] + [self.get(r, tag, what) for r in range(1, self.world.size)]

    def spread(self, tag: bytes, value: Any, what: str) -> Any:
        """Send rank 0's ``value`` to everybody and return it."""
        if self.world.rank:
            return self.get(0, tag, what)
        for r in range(1, self.world.size):
            self.send(r, tag, value)
        return value

    def agree(self, tag: bytes, value: Any, what: str) -> list[Any]:
        """Return every rank's ``value``, by rank, on every rank."""
        found: list[Any] = self.spread(tag + b">", self.gather(tag + b"<", value, what), what)
        return found

    def redial(self) -> None:
        """Let TCP begin anew between all ranks: call it when the emulated link of every rank is shaped again.

        TCP remembers the shortest round trip, then of a link without delay: later ones look like queues, so
        that cubic would end its slow start at 16 segments, and bbr send next to nothing for ten seconds.
        """
        own, peers = self.world.rank, self.world.peers
        listening, dialling = [r for r in peers if r < own], [r for r in peers if r > own]
        for peer in peers.values():
            peer.redial()
        for rank in listening:
            self.send(rank, b"D<", 0)
        for rank in dialling:
            self.get(rank, b"D<", "a new connection")
            self.send(rank, b"D>", 0)
        for rank in listening:
            self.get(rank, b"D>", "an answer over a new connection")

    def squared_norm(self, own: float) -> float:
        """Return the sum of every rank's squared gradient norm.

        Rank 0, the last to finish its backward pass, has the others' by then and passes the sum on ahead of
        its next activations: nobody's compute waits for a round trip.
        """
        parts = self.gather(b"N<", own, "the gradient norm")
        return float(self.spread(b"N>", sum(parts or ()), "the gradient norm"))

    def report(self, report: StepReport) -> None:
        """Send a step's report to rank 0, which keeps its own."""
        if self.world.rank:
            self.send(0, b"S", asdict(report))

    def reports(self, own: StepReport) -> list[StepReport]:
        """On rank 0: return every rank's report of the step that ``own`` is of."""
        others = [self.get(r, b"S", f"the report of step {own.step}") for r in range(1, self.world.size)]
        return [own] + [StepReport(**o) for o in others]


def report_of(rank: int, step: int, loss: float | None, stages: list[CompressedStage]) -> StepReport:
    """Return this rank's report of a step and start the stages' tallies again."""
    report = StepReport(rank, step, loss)
    for stage in stages:
        stage.end()
        report.add(stage.tally.take())
    return report
