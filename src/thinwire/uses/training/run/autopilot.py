"""The loop of a run whose recipe has a policy: link and compute, to sites, to choices, to the senders.

Rank 0 decides for all boundaries after each step, from the reports that it records anyway, one step late. A
changed choice travels as a control message; nobody waits for it, because packets say by which codec they are.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from thinwire.codecs import parse_codec
from thinwire.links.mesh import Peer
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World
from thinwire.uses.training.pipeline.choosing.pipeline_policy import (
    BACKWARD,
    FORWARD,
    BoundarySite,
    Choice,
    PipelinePolicy,
)
from thinwire.uses.training.pipeline.compressed_stage import CompressedStage
from thinwire.uses.training.run.record import Decision
from thinwire.uses.training.run.stepper import StepReport
from thinwire.uses.training.run.training_job import Job

CHANGE = b"P"  # tag of a changed choice
KEPT = 5  # steps whose compute is remembered: one that was disturbed must not move the choice


def _spelled(choice: Choice) -> dict[str, Any]:
    """Return what a sender needs of a choice, as plain values: codecs by their specs."""
    keyframe = None if choice.keyframe is None else repr(choice.keyframe)
    return {"codec": repr(choice.codec), "keyframe": keyframe, "direct": choice.direct}


def _read(said: dict[str, Any]) -> Choice:
    """Read what ``_spelled`` wrote; ``PayloadError`` for codecs that are none."""
    keyframe = said["keyframe"]
    return Choice(parse_codec(said["codec"]), keyframe and parse_codec(keyframe), bool(said["direct"]))


@dataclass
class _Direction:
    """What rank 0 knows of one direction of one boundary."""

    sender: int
    receiver: int
    choice: Choice | None = None
    bits: float | None = None
    changed: int = 0  # the step after which the choice was last changed
    estimate: dict[str, Any] = field(default_factory=dict)

    @property
    def way(self) -> str:
        return FORWARD if self.receiver > self.sender else BACKWARD


class Autopilot:
    """Carry out a recipe's policy; on a rank but the first, only what rank 0 decides."""

    def __init__(
        self,
        job: Job,
        policy: PipelinePolicy,
        world: World,
        stages: Sequence[CompressedStage],
        telemetry: Telemetry,
    ) -> None:
        self._job, self._world, self._telemetry = job, world, telemetry
        self._policy = policy.under(job.config.schedule)
        self._stages = {s.stage_index: s for s in stages}
        self._stage_count = n = job.config.stages
        self._directions = [_Direction(b, b + 1) for b in range(n - 1)]
        self._directions += [_Direction(b + 1, b) for b in range(n - 1)]
        self._compute: dict[int, deque[float]] = {r: deque(maxlen=KEPT) for r in range(world.size)}
        if world.rank:
            world.peers[0].mailbox.on(CHANGE, lambda _tag, body: self._obey(json.loads(body)))

    def measure(self) -> None:
        """Measure every link that carries a boundary, by a short probe, so that there is an estimate."""
        near = {self._rank(s + d) for s in self._stages for d in (-1, 1) if 0 <= s + d < self._stage_count}
        peers = [self._world.peers[r] for r in near if r != self._world.rank]
        mine = [self._measured(peer) for peer in peers]
        links = self._telemetry.gather(b"B", mine, "the measured links")
        for link in (link for rank in links or () for link in rank):
            self._note(link)

    def decide(self, step: int, coming: int, reports: Sequence[StepReport] = ()) -> list[Decision]:
        """On rank 0: choose anew after ``step`` steps, tell the senders, and return what changed.

        ``coming`` is the next step to start, the first that can follow: reports may be read a step late.
        """
        if coming > self._job.steps:
            return []
        for report in reports:
            self._compute[report.rank].append(report.compute_s)
            for link in report.links:
                self._note(link)
            self._note_bits(report)
        sites = [self._site(d, step, coming) for d in self._directions]
        changed = []
        chosen = self._policy.choose(sites)
        for direction, site, choice in zip(self._directions, sites, chosen, strict=True):
            before, direction.choice = direction.choice, choice
            if before is None or before.rung != choice.rung:
                # Until its own bits are known, what was foretold: Gaussian values would have it fall again.
                direction.bits, direction.changed = choice.bits, step
                self._tell(direction, choice)
                changed.append(_decision(step, site, choice))
        return changed

    def _rank(self, stage: int) -> int:
        return stage % self._world.size

    def _measured(self, peer: Peer) -> dict[str, Any]:
        found = peer.measure()
        ends = {"source": self._world.rank, "destination": peer.rank}
        seen = {"rate_bytes_s": found.rate, "rtt_s": found.rtt, "age_s": found.age}
        return ends | seen | {"restarts": peer.restarts}

    def _note(self, link: dict[str, Any]) -> None:
        for d in self._directions:
            if (self._rank(d.sender), self._rank(d.receiver)) == (link["source"], link["destination"]):
                d.estimate = d.estimate | link  # steps report what changes; not whether the window shuts

    def _note_bits(self, report: StepReport) -> None:
        for d in self._directions:
            # The step after a change was on its way by then, still by the choice before.
            known = report.values[d.way] and report.step > d.changed + 1
            if self._rank(d.sender) == report.rank and known:
                d.bits = 8 * report.bytes[d.way] / report.values[d.way]

    def _site(self, d: _Direction, step: int, coming: int) -> BoundarySite:
        config, first_pass = self._job.config, self._job.batches.steps_per_pass
        return BoundarySite(
            d.sender,
            d.receiver,
            values=config.batch * self._job.task.values,
            messages=config.microbatches,
            rate=d.estimate.get("rate_bytes_s"),
            rtt=d.estimate.get("rtt_s"),
            age=d.estimate.get("age_s"),
            sender_s=self._compute_s(d.sender),
            receiver_s=self._compute_s(d.receiver),
            restarts=d.estimate.get("restarts", False),
            fresh=float(coming <= first_pass),
            # What first visits took says nothing of the deltas that follow them.
            bits=None if step <= first_pass < coming else d.bits,
            rung=None if d.choice is None else d.choice.rung,
            streak=0 if d.choice is None else d.choice.streak,
        )

    def _compute_s(self, stage: int) -> float | None:
        known = self._compute[self._rank(stage)]
        return median(known) * self._world.size / self._stage_count if known else None

    def _tell(self, d: _Direction, choice: Choice) -> None:
        said = {"stage": d.sender, "way": d.way} | _spelled(choice)
        rank = self._rank(d.sender)
        if rank == self._world.rank:
            self._obey(said)
        else:
            self._world.peers[rank].mailbox.send(CHANGE, json.dumps(said).encode(), "control")

    def _obey(self, said: dict[str, Any]) -> None:
        self._stages[said["stage"]].follow(said["way"], _read(said))


def _decision(step: int, site: BoundarySite, choice: Choice) -> Decision:
    boundary, way = site.name.split()
    first = "" if choice.keyframe is None else f", first visits {choice.keyframe!r}"
    return Decision(
        step, boundary, way, f"{choice.codec!r}{first}", choice.bits, choice.reason, site.rate, site.rtt
    )
