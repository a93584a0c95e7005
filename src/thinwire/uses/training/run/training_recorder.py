"""The recorder of a run: rank 0 turns reports into the run record, metrics, event files and the display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.links.metered import Traffic
from thinwire.runs.machine.interrupts import held_back
from thinwire.runs.machine.processor import environment, peak_rss_bytes, pick_threads
from thinwire.runs.ranks.launcher import link_of
from thinwire.runs.ranks.linkwatch import LinkWatch, added
from thinwire.runs.ranks.world import World
from thinwire.runs.records.progress import Progress
from thinwire.runs.records.run_record import INVALID, LinkMetrics, RecipeText, WireCounts
from thinwire.runs.records.tensorboard import EventLog, remove_events
from thinwire.runs.records.writer import RUN, RunWriter
from thinwire.uses.training.run.export import SAVING, remove_models, saving_bytes
from thinwire.uses.training.run.record import (
    PARTS,
    BoundaryBytes,
    Decision,
    Evaluation,
    Loss,
    Replicas,
    ReplicasRecord,
    StepMetrics,
    TrainRecord,
)
from thinwire.uses.training.run.resume import bytes_saving, doubts, inherited
from thinwire.uses.training.run.stepper import EXCHANGE, STREAMS, WAYS, StepReport
from thinwire.uses.training.run.training_job import Job

LABELS = (*STREAMS, "control", "evaluation")
SHARES = tuple(f"{part}_s" for part in PARTS)


class TrainRecorder:
    """Keep rank 0's record; on other ranks only count what this rank sent. ``facts``: of all devices."""

    def __init__(self, job: Job, world: World, facts: Sequence[dict[str, Any]] = ()) -> None:
        self.job, self.world = job, world
        self.values = dict.fromkeys(STREAMS, 0)
        self.streams = (*(WAYS if job.config.stages > 1 else ()), *([EXCHANGE] if world.replicas > 1 else []))
        self.exchanges = 0
        self._decided = 0  # steps up to the newest decision
        self._aligned = 0  # steps up to the newest evaluation
        self._waited = 0.0  # seconds that this rank was ahead of the slowest replica at evaluations
        self.before: dict[str, Any] = {}  # this rank's totals from before a resume
        self._seconds: list[float] = []
        self._owner = world.rank == 0
        self._rtt: float | None = None
        self.astray = 0  # bytes of exchanges that are missing from, or too much in, what the links carried
        self.heldout: float | None = None  # the newest held-out loss, on rank 0
        self._saved_before = 0  # bytes of saving before a resume
        self.links = LinkWatch(world)
        if self._owner:
            config = job.config
            self.progress = Progress(job.config.recipes, job.steps, config.quiet)
            self.record = _new_record(job, facts)
            self._replaces = not config.resume and (Path(config.out) / RUN).exists()
            self.writer = RunWriter(config.out, self.record)
            if self._replaces:
                remove_events(Path(config.out))
            self.events = EventLog(config.out, config.tensorboard)
            for note in job.notes:
                self.note(note)
            if self.events.note and not config.quiet:  # not for the record: it says nothing of the numbers
                self.progress.note(self.events.note)

    def phase(self, text: str) -> None:
        """Say what is happening."""
        if self._owner:
            self.progress.phase(text)

    def note(self, text: str) -> None:
        """Warn, on the display and in the record."""
        if self._owner:
            self.progress.note(text)
            self.writer.note(text)

    def took(self, seconds: float) -> None:
        """Remember the duration of a step, in order."""
        self._seconds.append(seconds)

    def start_step(self) -> None:
        """Count what the links carry from here, and remember the round trip measured so far. Between steps:
        other ranks may evaluate already when this one ends its last step, and evaluation is not shaped."""
        self.links.start_step()
        trips = [peer.reliable.estimate().rtt for peer in self.world.peers.values()]
        self._rtt = min((t for t in trips if t is not None), default=self._rtt)

    def step(self, reports: list[StepReport], lr: float) -> float:
        """Book one step from every rank's report; return its loss."""
        own = reports[0]
        losses = [r.loss for r in reports if r.loss is not None]  # one a replica, of shares of the batch
        loss = sum(losses) / len(losses)
        mean = {name: sum(getattr(r, name) for r in reports) / len(reports) for name in SHARES}
        sent = {way: sum(r.bytes[way] for r in reports) for way in self.streams}
        values = {way: sum(r.values[way] for r in reports) for way in self.streams}
        self.exchanges += own.exchanges
        if isinstance(self.record, ReplicasRecord):
            self.record.replicas.exchanges = int(self.before.get("exchanges", 0)) + self.exchanges
        metrics = StepMetrics(
            step=own.step,
            loss=loss,
            seconds=own.seconds,
            **mean,
            bytes=sent,
            bits={way: 8 * sent[way] / values[way] if values[way] else None for way in self.streams},
            lr=lr,
            ranks=[{name: getattr(r, name) for name in SHARES} for r in reports],
            links=[LinkMetrics(**link) for r in reports for link in r.links],
        )
        with held_back():
            for way in self.streams:
                self.values[way] += values[way]
            self.writer.add(metrics)
        self.events.write(metrics.scalars(), metrics.step)
        self.progress.step(vars(metrics))
        return loss

    def decided(self, decisions: list[Decision]) -> None:
        """Book what a policy changed."""
        if decisions:
            self._outcome()
            self._decided = len(self._seconds)
            self.record.decisions += decisions
            self.writer.write()

    def _outcome(self) -> None:
        """Book what a step took under the last decision between replicas."""
        took = self._seconds[self._decided :]
        if took and self.world.replicas > 1 and self.record.decisions:
            self.record.decisions[-1].outcome_s = sum(took) / len(took)

    def evaluated(
        self,
        step: int,
        heldout: float | None,
        seen: float | None,
        accuracy: float | None = None,
        final: bool = False,
    ) -> None:
        """Book an evaluation after ``step`` steps: the first, the ``final`` one or one on the way."""
        self.heldout, loss = heldout, self.record.loss
        if step == 0:
            loss.eval_first, loss.train_eval_first, loss.accuracy_first = heldout, seen, accuracy
        elif final:
            loss.eval_final, loss.train_eval_final, loss.accuracy_final = heldout, seen, accuracy
        elif heldout is not None and seen is not None:
            spent = self.seconds if self.world.replicas > 1 else None
            loss.evaluations.append(Evaluation(step, heldout, seen, accuracy, spent))
            values = {"loss/heldout": heldout, "loss/train_slice": seen, "accuracy/heldout": accuracy}
            self.events.write(values, step)
        self.writer.write()

    def part(self) -> float:
        """Return the seconds of this rank's steps since the last evaluation."""
        part, self._aligned = sum(self._seconds[self._aligned :]), len(self._seconds)
        return part

    def aligned(self, seconds: float) -> None:
        """Count by how much the slowest replica came later to an evaluation: that is training's time too."""
        self._waited += seconds

    def unreached(self, target: float) -> None:
        """Say that the last step ended a run that was to come to a loss."""
        loss = self.heldout
        if self._owner and loss is not None:
            at = f"{self.job.steps} steps ended it at a held-out loss of {loss:.3f}"
            more = "" if loss > target else " of --eval-samples, which that of all samples exceeds,"
            self.record.unreached = f"{at}{more}, before --until-loss {target:g}".replace(",,", ",")

    def ended_early(self) -> None:
        """Take the newest evaluation for the final one."""
        if self._owner:
            loss, last = self.record.loss, self.record.loss.evaluations[-1]
            loss.eval_final, loss.train_eval_final = last.heldout, last.train
            loss.accuracy_final = last.accuracy
            self.writer.write()

    @property
    def seconds(self) -> float:
        """Seconds of all steps so far."""
        return float(self.before.get("seconds", 0.0)) + sum(self._seconds) + self._waited

    def totals(self, world: World) -> dict[str, Any]:
        """Return this rank's counts from the start of the run, as plain values."""
        sent: dict[str, int] = dict.fromkeys(LABELS, 0)
        boundaries: dict[str, int] = {}
        counted = self.links.count()
        for rank, labels in counted.sent.items():
            for label, traffic in labels.items():
                if label == SAVING:  # which has a figure of its own
                    continue
                known = label if label in sent else "control"
                sent[known] += traffic.nbytes
                if label in WAYS:
                    pair = f"{min(rank, world.rank)}-{max(rank, world.rank)}"
                    boundaries[f"{pair} {label}"] = boundaries.get(f"{pair} {label}", 0) + traffic.nbytes
        now: dict[str, Any] = {
            "sent": sent,
            "boundaries": boundaries,
            "values": self.values,
            "exchanges": self.exchanges,
            "seconds": sum(self._seconds) + self._waited,
            "rss": peak_rss_bytes(),
            "rtt": self._rtt,
            "wire": counted.wire,
            "watched": counted.between.get(EXCHANGE, Traffic()).nbytes,
        }
        if self._owner:
            loss = self.record.loss
            now["eval_first"] = [loss.eval_first, loss.train_eval_first]
            now["accuracy_first"] = loss.accuracy_first
            now["eval_samples"] = self.job.config.eval_samples
            now["evaluations"] = [vars(e) for e in loss.evaluations]
            now["decisions"] = [vars(d) for d in self.record.decisions]
        return _sum(self.before, now)

    def replace(self) -> None:
        """Remove the models of the run that this one replaces: now that it begins, its own are loaded."""
        if self._owner and self._replaces:
            remove_models(Path(self.job.config.out), self.job.config.model)

    def resumed(self, step: int, totals: dict[str, Any]) -> None:
        """Go on from a checkpoint made after ``step`` steps, with its totals."""
        self.before = totals
        if self._owner:
            loss = self.record.loss
            loss.eval_first, loss.train_eval_first = totals["eval_first"]
            loss.accuracy_first = totals.get("accuracy_first")
            loss.evaluations = [Evaluation(**e) for e in totals["evaluations"]]
            own = self.job.config.eval_samples
            before = totals.get("eval_samples", own)
            if own and before not in (0, own):  # they do not compare with those to come
                self.record.loss = Loss()
            self.record.decisions = [Decision(**d) for d in totals["decisions"]]
            self.writer.close("running")
            self._saved_before = self.record.bytes["saving"] = bytes_saving(Path(self.job.config.out))
            # Before the new record takes the old one's place, lest a killed run leave one without them.
            for note in (f"resumed after step {step}", *doubts(self.job.config, step)):
                self.note(note)
            if self.record.loss is not loss:
                told = f"--eval-samples was {before} up to step {step} and is {own} since then"
                self.note(f"{told}: evaluations of before are left out")
            self.writer = RunWriter(self.job.config.out, self.record, step)
            self.events.resumed(step)

    def compared(self, equal: bool) -> None:
        """Book whether all replicas held the same bits at the end."""
        if self._owner and isinstance(self.record, ReplicasRecord):
            self.record.replicas.equal = equal
            self.writer.write()

    def emulation(self, lateness: float) -> None:
        """Book how late the shaped links delivered, on average, in seconds."""
        if self._owner and not self.job.shape.is_none:
            self.record.link.lateness_s = lateness
            self.writer.write()

    def finish(self, totals: list[dict[str, Any]] | None) -> None:
        """Book the counts of all ranks at the end of training."""
        if totals is None:
            return
        record, sent, values = self.record, record_bytes(totals), totals[0]["values"]
        self.astray = sent[EXCHANGE] - sum(t["watched"] for t in totals)
        self._outcome()
        record.bytes |= {name: sent[name] for name in ("control", "evaluation")}
        for way in self.streams:
            record.sent(way, sent[way], values[way])
        if isinstance(record, ReplicasRecord):
            record.replicas.exchanges = totals[0]["exchanges"]
        record.boundaries = [
            BoundaryBytes(*name.split(" ", 1), bytes=n)  # type: ignore[misc, arg-type]  # "0-1 forward"
            for name, n in sorted(_merged(t["boundaries"] for t in totals).items())
        ]
        record.totals["seconds"] = totals[0]["seconds"]
        record.memory.peak_rss_bytes = [t["rss"] for t in totals]
        record.link.rtt_s = totals[0]["rtt"]
        record.wire = [WireCounts(**counts) for t in totals for counts in t["wire"]]
        self.writer.write()

    def saved(self) -> None:
        """Book what it took to bring the model to this rank."""
        if self._owner:
            self.record.bytes["saving"] = self._saved_before + saving_bytes(self.world)
            self.writer.write()

    def close(self, status: str, why: str = "") -> None:
        """Close record, event files and display; the first call counts."""
        if self._owner:
            if why and status in ("failed", "invalid"):
                self.record.notes.append(why)
            if status == "done" and inherited(self.record) is not None:
                status = INVALID
            self.writer.close(status)
            self.events.close()
            self.progress.close()


def _new_record(job: Job, facts: Sequence[dict[str, Any]]) -> TrainRecord:
    config = job.config
    there = environment(config.dtype, pick_threads(config), job.compute.device)
    kind = ReplicasRecord if config.replicas > 1 else TrainRecord
    record = kind(
        recipe=RecipeText(config.recipes, job.spec),
        config=job.config.to_dict(),
        environment=there | ({"devices": list(facts)} if facts else {}),
        link=link_of(job.config),
    )
    if isinstance(record, ReplicasRecord):
        record.replicas = Replicas(config.replicas, config.replica_recipe)
    return record


def record_bytes(totals: list[dict[str, Any]]) -> dict[str, int]:
    """Return the bytes of each traffic class, summed over the ranks that sent them."""
    return _merged(t["sent"] for t in totals)


def _merged(counts: Any) -> dict[str, int]:
    out: dict[str, int] = {}
    for each in counts:
        for k, n in each.items():
            out[k] = out.get(k, 0) + n
    return out


def _sum(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Add the counts of the part before a resume."""
    if not before:
        return now
    return now | {
        "sent": _merged([before["sent"], now["sent"]]),
        "boundaries": _merged([before["boundaries"], now["boundaries"]]),
        "values": _merged([before["values"], now["values"]]),
        "exchanges": before.get("exchanges", 0) + now["exchanges"],
        "seconds": before["seconds"] + now["seconds"],
        "rss": max(before["rss"], now["rss"]),
        "wire": added(before["wire"], now["wire"]),
        "watched": before.get("watched", before["sent"][EXCHANGE]) + now["watched"],
    }
