"""What each rank tells of a step. Rank 0, which keeps the recorder, reads it a step late: nobody waits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.uses.training.pipeline.boundary import BACKWARD, FORWARD, Tally
from thinwire.uses.training.pipeline.stage import CompressedStage

TAG = b"S"
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

    def send(self, telemetry: Telemetry) -> None:
        """Send it to rank 0, which keeps its own."""
        if telemetry.world.rank:
            telemetry.send(0, TAG, asdict(self))

    def of_all(self, telemetry: Telemetry) -> list[StepReport]:
        """Return, on rank 0, every rank's report of this step."""
        what = f"the report of step {self.step}"
        return [self] + [StepReport(**telemetry.get(r, TAG, what)) for r in range(1, telemetry.world.size)]


def report_of(rank: int, step: int, loss: float | None, stages: list[CompressedStage]) -> StepReport:
    """Return this rank's report of a step and start the stages' tallies again."""
    report = StepReport(rank, step, loss)
    for stage in stages:
        stage.end()
        report.add(stage.tally.take())
    return report
