"""One rank of a training run: the loop, from the cut and the first evaluation to the saved model."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.dtypes import dtype_of, name_of
from thinwire.runs.emulator.shaping_control import lifted, rewind
from thinwire.runs.machine import devices
from thinwire.runs.machine.compute import Compute
from thinwire.runs.machine.processor import keep_freed, pick_threads
from thinwire.runs.models.cuts import LayerCosts, cut_for, measured_costs, ranges, stage_costs
from thinwire.runs.ranks.joining import check_options
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World
from thinwire.runs.records.progress import megabytes
from thinwire.types import MeasurementError, ThinwireError, require
from thinwire.uses.training.pipeline import boundary
from thinwire.uses.training.replicas.transport import ReplicaNotFinite
from thinwire.uses.training.run import resume
from thinwire.uses.training.run.autopilot import Autopilot
from thinwire.uses.training.run.export import export_model
from thinwire.uses.training.run.options import MEASURED, TrainConfig
from thinwire.uses.training.run.stepper import (
    Stepper,
    StepReport,
    are_equal,
    build_parts,
    check_same_parameters,
    check_same_weights,
    decision,
    joined,
    measure_links,
    ran_away,
    scheduled_rate,
)
from thinwire.uses.training.run.training_job import Job, prepare
from thinwire.uses.training.run.training_recorder import TrainRecorder
from thinwire.uses.training.run.warmup import warm_up

LATENESS = 0.1  # of the link's delay: mean lateness of its messages above which a run is no measurement
LAG = 1.0  # seconds that replicas may be ahead of each other's reports: more than a round trip
MIN_LATENESS = 0.01  # seconds; a scheduler's turn on a busy machine


def run_rank(config: TrainConfig, trial: bool = False) -> None:
    """Run this process's rank of ``config``; the environment says which (torchrun's variables).

    ``trial``: as of ``prepare``, where nobody has prepared this run before.
    Errors: ``ThinwireError`` of any kind; whatever happens, rank 0 leaves a readable record.
    """
    keep_freed()
    torch.set_num_threads(pick_threads(config))
    device = devices.own(config.device)
    job = dataclasses.replace(prepare(config, trial), compute=Compute.of(device, config.dtype))
    torch.manual_seed(config.seed)
    with joined(job) as world:
        same_everywhere(job, world)
        job, facts = agree_compute(job, world)
        _with_recorder(agree_cut(_agree_resume(job, world), world), world, facts)


def _with_recorder(job: Job, world: World, facts: Sequence[dict[str, Any]]) -> None:
    recorder = TrainRecorder(job, world, facts)
    try:
        with devices.told():
            run = TrainingRank(job, world, recorder)
            try:
                run.go()
            finally:
                run.stepper.close()
        recorder.close("done")
    except KeyboardInterrupt:
        recorder.close("interrupted")
        raise
    except BaseException as e:
        recorder.close("invalid" if isinstance(e, MeasurementError) else "failed", str(e))
        raise


@contextlib.contextmanager
def _diverging(step: int) -> Iterator[None]:
    """Say of values that overflowed in which step it was, and what helps."""
    try:
        yield
    except boundary.NotFinite as e:
        raise ThinwireError(f"step {step}: {e}, or lower --lr") from e
    except ReplicaNotFinite as e:
        raise ThinwireError(f"step {step}: {e}; lower --lr, or raise --warmup") from e


def same_everywhere(job: Job, world: World) -> None:
    """Raise ``InputError`` unless all ranks train the same: text and model count by their contents."""
    config, contents = job.config, {"data": job.digest, "model": job.source.digest}
    telemetry = Telemetry(world, config.deadline)
    check_options(telemetry, config, {"lr": config.learning_rate}, contents)


def agree_compute(job: Job, world: World) -> tuple[Job, list[dict[str, Any]]]:
    """Return the job with what crosses between its stages agreed, and the facts of every rank's device.

    A note says where ranks compute in unlike dtypes, as ``--dtype auto`` may choose on unlike machines.
    """
    own = job.compute
    mine = [str(own.device), str(own.dtype), devices.facts(own.device)]
    ranks = Telemetry(world, job.config.deadline).agree(b"V", mine, "what it computes on")
    found = [Compute(torch.device(device), dtype_of(dtype)) for device, dtype, _ in ranks]
    kinds = {compute.dtype for compute in found}
    differ = "; ".join(f"rank {r} computes in {name_of(c.dtype)}" for r, c in enumerate(found))
    notes = (*job.notes, f"{differ}; give --dtype for one of them") if len(kinds) > 1 else job.notes
    return dataclasses.replace(job, compute=own.among(found), notes=notes), [facts for *_, facts in ranks]


def _agree_resume(job: Job, world: World) -> Job:
    """Return the job with --auto-resume decided: it goes on where all ranks have a checkpoint of one step."""
    config = job.config
    if config.resume or not config.auto_resume:
        return job
    saved = resume.steps_saved(Path(config.out), world.rank)
    ranks = Telemetry(world, config.deadline).agree(b"A", saved, "the list of checkpoints")
    if resume.newest(ranks) is not None:
        return dataclasses.replace(job, config=config.replace(resume=True))
    resume.check_own(job, world.rank)
    notes = (*job.notes, *resume.of_no_use(ranks))
    return dataclasses.replace(job, notes=notes)


class TrainingRank:
    """The loop of one rank over steps and evaluations, and what surrounds it."""

    def __init__(self, job: Job, world: World, recorder: TrainRecorder) -> None:
        self.job, self.world, self.recorder = job, world, recorder
        self.config = job.config
        recorder.phase("loading the model")
        self.telemetry = Telemetry(world, self.config.deadline)
        self._parts = build_parts(job, world)
        self.stepper = Stepper(job, world, self._parts)
        self.stages, self.synchroniser = self.stepper.stages, self.stepper.synchroniser
        if self.synchroniser is not None:
            check_same_parameters(world, self.telemetry, self.stages)
        self.checkpoints = resume.Checkpoints(
            job, world.rank, self.stages, self.stepper.optimiser, self.synchroniser
        )
        policy = job.recipe.policy
        self.autopilot = policy and Autopilot(job, policy, world, self.stages, self.telemetry)
        self._reports: deque[StepReport] = deque()  # of steps that are not booked yet
        self._lag = LAG if self.config.stages == 1 else 0.0
        self._ended = False  # before the last step, as --until-loss asks for
        self._old_checkpoints = not self.config.resume  # of an earlier run, which may be there

    def go(self) -> None:
        """Train, evaluate, save."""
        done = self._resume()
        if not done:
            self._evaluate(0)
        job, working = self.job, self.telemetry.working
        warm_up(self._parts, self.stepper.optimiser, self.config, job.task, job.recipe, working, job.compute)
        self._take_bearings(done)
        if self.synchroniser is not None:
            check_same_weights(self.world, self.telemetry, self.stages, self.synchroniser)
            if self.job.replica_recipe.policy is not None:
                measure_links(self.world)
        self.telemetry.agree(b"go", 0, "the start of training")
        self.recorder.replace()
        if self.world.rank == 0:
            rewind()  # a trace begins with the first step, however long loading took
        self._steps(done)
        if self._ended:
            self.recorder.ended_early()
            if self.synchroniser is not None:
                self.synchroniser.settle()
        else:
            self._evaluate(self.job.steps)
            target = self.config.until_loss
            if target is not None and not self._is_enough(self.recorder.heldout, target):
                self.recorder.unreached(target)
        self.recorder.finish(self._final_reports())
        if self.synchroniser is not None:
            equal = are_equal(self.world, self.telemetry, self.stages)
            self.recorder.compared(equal)
            require(
                equal, ThinwireError, "the replicas do not hold the same bits; this is a fault of thinwire's"
            )
        late = self._lateness()
        if self.config.save_model or self.config.lora:
            self._save()
        self._check(late)

    def _steps(self, done: int) -> None:
        batches = chain(self.job.batches.starting_at(done), [torch.empty(0, dtype=torch.int64)])
        for step, (ids, upcoming) in enumerate(pairwise(batches), done + 1):
            self.recorder.start_step()
            start = time.perf_counter()
            with _diverging(step):
                report = self.stepper.step(step, ids, upcoming, self._rest(step))
            report.links = self.recorder.links.end_step()
            report.send(self.telemetry)
            self._collect(step + 1, self._lag)
            report.ended = time.perf_counter()
            report.seconds = report.ended - start
            self.recorder.took(report.seconds)
            self._reports.append(report)
            self._now_and_then(step)
            if self._reached(step):
                break
        self._collect(self.job.steps + 1)

    def _reached(self, step: int) -> bool:
        """Return whether the run may end after ``step``, before the last, as rank 0's record says to all."""
        config = self.config
        if config.until_loss is None or step % config.eval_every or step == self.job.steps:
            return False
        self._ended = self._is_enough(self.recorder.heldout, config.until_loss)
        return self._ended

    def _is_enough(self, loss: float | None, target: float) -> bool:
        """Return whether ``loss``, rank 0's, is at the target, and that of all held-out samples is too."""
        enough = self.telemetry.spread(b"B", loss is not None and loss <= target, "whether to go on")
        every, some = self.job.heldout_blocks(), self.job.eval_blocks()[0]
        if not enough or self.config.until_sample or len(every) == len(some):
            return bool(enough)
        found = self._pass(every)
        loss = _means([rank[0] for rank in found])[0] if found else None
        return bool(self.telemetry.spread(b"B", loss is not None and loss <= target, "whether to go on"))

    def _rest(self, step: int) -> str:
        """Return what replicas do behind a step, in its time: what looks at weights needs them equal.

        What is saved is that of a run which ends there, and may go on from there.
        """
        if step == self.job.steps:
            return "finish"
        if any(
            every and step % every == 0 for every in (self.config.checkpoint_every, self.config.save_every)
        ):
            return "drain"
        return "rest" if self.config.eval_every and step % self.config.eval_every == 0 else ""

    def _now_and_then(self, step: int) -> None:
        every, last = self.config.eval_every, step == self.job.steps
        if every and step % every == 0 and not last:
            self._collect(step + 1)
            self._evaluate(step)
            self._take_bearings(step)
        every = self.config.checkpoint_every
        if every and step % every == 0:
            self._collect(step + 1)
            self.recorder.phase("writing a checkpoint")
            self._save_checkpoint(step)
        every = self.config.save_every
        if every and step % every == 0 and not last:
            self._collect(step + 1)
            self._save()

    def _save(self) -> None:
        self.recorder.phase("saving the model" if self.config.save_model else "saving the adapters")
        if self.world.replica == 0:
            pipeline = self.world.pipeline
            with self._shared():
                export_model(self.job, pipeline, self.stages, Telemetry(pipeline, self.config.deadline))
        self.recorder.saved()

    def _save_checkpoint(self, step: int) -> None:
        if self._old_checkpoints:
            self._remove_old_checkpoints()
            self.telemetry.agree(b"D", 0, "the old checkpoints to be gone")  # or one could drop a new folder
        self.checkpoints.save(step, self.recorder.totals(self.world))

    def _collect(self, coming: int, lag: float = 0.0) -> None:
        """On rank 0, book all steps that ended ``lag`` seconds ago, once the others' reports are here.

        ``coming`` starts next. Replicas that exchange now and then do not wait for each other's reports.
        """
        now = time.perf_counter()
        while self._reports and self._reports[0].ended <= now - lag:
            report = self._reports.popleft()
            if self.world.rank == 0:
                self._book(report, coming)

    def _book(self, report: StepReport, coming: int) -> None:
        """Book a step. Errors: ``ThinwireError`` for a loss that is not finite."""
        reports = report.of_all(self.telemetry)
        loss = self.recorder.step(reports, scheduled_rate(self.config, report.step, self.job.steps))
        if not math.isfinite(loss):
            raise ThinwireError(ran_away(self.config, "loss", report.step, loss))
        if self.autopilot:
            self.recorder.decided(self.autopilot.decide(report.step, coming, reports))
        if self.synchroniser is not None:
            self.recorder.decided([decision(change) for change in self.synchroniser.changes])
            self.synchroniser.changes.clear()

    def _take_bearings(self, step: int) -> None:
        """Let the policy, if there is one, measure the links and decide before the next step."""
        if self.autopilot:
            self.autopilot.measure()
            if self.world.rank == 0:
                self.recorder.decided(self.autopilot.decide(step, step + 1))

    def _evaluate(self, step: int) -> None:
        """Evaluate after ``step`` steps, on held-out samples and on a slice of what the run trains on."""
        if not self.config.eval_samples:
            return
        found = self._pass(*self.job.eval_blocks())
        if found:
            (loss, right), (seen_loss, _) = (_means([rank[k] for rank in found]) for k in range(2))
            accuracy = right if self.job.task.accuracy else None
            self.recorder.evaluated(step, loss, seen_loss, accuracy, final=step == self.job.steps)

    def _pass(self, *parts: Tensor) -> list[Any] | None:
        """Evaluate blocks of samples; return on rank 0 every rank's sums over each part."""
        nbytes = 4 * sum(map(len, parts)) * self.job.task.values
        self.recorder.phase(f"evaluating: {megabytes(nbytes)} uncompressed between stages")
        for s in self.stages:
            s.submod.eval()
        with self._unshaped(), self._shared(), torch.no_grad():
            sums = [self.stepper.evaluate(blocks) for blocks in parts]
        for s in self.stages:
            s.submod.train()
            s.end()
            s.tally.take()
        part = self.recorder.part()
        found = self.telemetry.gather(b"E", [*sums, part], "the evaluation losses")
        if found and self.world.replicas > 1:
            self.recorder.aligned(max(rank[-1] for rank in found) - part)
        return found

    def _shared(self) -> contextlib.AbstractContextManager[None]:
        """Have the parameters in place that all replicas share."""
        return self.synchroniser.shared() if self.synchroniser else contextlib.nullcontext()

    @contextlib.contextmanager
    def _unshaped(self) -> Iterator[None]:
        """Let evaluation pass at full speed: it is not part of the run that is measured."""
        if self.world.pipeline.size == 1:  # nothing crosses links, so they may stay as they are
            yield
            self.telemetry.agree(b"U", 0, "the end of the evaluation")
            return
        self.telemetry.agree(b"O", 0, "the start of the evaluation")  # steps elsewhere keep the shape
        with contextlib.ExitStack() as stack:
            for peer in self.world.peers.values():
                stack.enter_context(peer.lifted())
            emulated = stack.enter_context(lifted())
            yield
        self.telemetry.agree(b"U", 0, "the end of the evaluation")
        if emulated:
            self.telemetry.redial()
        for peer in self.world.peers.values():
            peer.reliable.forget_estimate()  # what was measured meanwhile is another link's

    def _resume(self) -> int:
        """Load the newest checkpoint that every rank has; return its step, or 0."""
        out, rank = Path(self.config.out), self.world.rank
        if not self.config.resume:
            if not self.config.auto_resume:
                self._remove_old_checkpoints()
            return 0
        saved = self.telemetry.agree(b"C", resume.steps_saved(out, rank), "the list of checkpoints")
        step = resume.resumable(self.job, saved)
        totals = self.checkpoints.load(step)
        self.telemetry.agree(b"L", step, "the checkpoint to be loaded")
        resume.forget_after(out, rank, step)
        self.recorder.resumed(step, totals)
        if self.synchroniser is not None:
            self.synchroniser.changes.clear()  # how it began is in the record already
        return step

    def _remove_old_checkpoints(self) -> None:
        """Remove an earlier run's, with --auto-resume not before there are new ones: some may come back."""
        resume.clear(Path(self.config.out), self.world.rank)
        self._old_checkpoints = False

    def _lateness(self) -> float:
        """Return the mean lateness of the rank whose shaped links kept their times worst, in seconds."""
        own = max((p.shaped.lateness.mean for p in self.world.peers.values()), default=0.0)
        worst: float = max(self.telemetry.agree(b"Y", own, "the lateness of its links"))
        self.recorder.emulation(worst)
        return worst

    def _check(self, worst: float) -> None:
        """Raise ``MeasurementError`` where the link was not the one asked for, or two counts differ."""
        allowed = max(MIN_LATENESS, LATENESS * self.job.shape.delay)
        if worst > allowed:
            raise MeasurementError(
                f"the shaped link ran {1e3 * worst:.1f} ms late on average, more than {1e3 * allowed:.1f}; "
                "the machine is too busy for this measurement, so end other work and run it again"
            )
        if astray := self.recorder.astray:
            raise MeasurementError(
                f"the record's bytes.exchange has {astray} bytes more than its wire[].payload_bytes; "
                "this is a fault of thinwire's"
            )

    def _final_reports(self) -> list[dict[str, Any]] | None:
        return self.telemetry.gather(b"Z", self.recorder.totals(self.world), "the final counts")


def _means(sums: list[tuple[float, int, int]]) -> tuple[float | None, float | None]:
    """Return the mean loss and the share that was right, from sums of both over so many targets."""
    loss, count, right = (sum(column) for column in zip(*sums, strict=True))
    return (loss / count, right / count) if count else (None, None)


def agree_cut(job: Job, world: World) -> Job:
    """Return the job cut by the machines' speeds where it asks for that, with a note of what was measured.

    All ranks time at once, because those on one machine share its cores in the run too. A resumed run keeps
    the cut of its checkpoints. Errors: ``LinkError`` naming a rank that does not answer.
    """
    if job.config.cut != MEASURED:
        return job
    telemetry = Telemetry(world, job.config.deadline)
    sizes = telemetry.spread(b"J", _kept(job, world), "the cut of the checkpoints")
    if sizes is not None:
        note = f"cut {_text(sizes)}, as measured when the run was started"
        return _with(job, ranges(sizes), note)
    telemetry.agree(b"T", 0, "the model to be timed")
    own = _measure(job, telemetry.working)
    found = telemetry.agree(b"T", [own.layers, own.head], "the times of its layers")
    ranks = [LayerCosts(tuple(layers), head) for layers, head in found]
    # As the stages are dealt out: every so many to a rank. All replicas have the cut of the first.
    size = world.pipeline.size
    machines = [ranks[k % size] for k in range(job.config.stages)]
    cut = cut_for(machines, size)
    return _with(job, cut, _note(cut, machines, size))


def _kept(job: Job, world: World) -> list[int] | None:
    return resume.saved_cut(Path(job.config.out), 0) if job.config.resume and world.rank == 0 else None


def _measure(job: Job, working: Callable[[], None]) -> LayerCosts:
    config, compute = job.config, job.compute
    about: dict[str, Any] = {"lora": config.lora, "compute": compute, "working": working}
    return measured_costs(job.source.config, config.rows, config.seq, **about)


def _with(job: Job, cut: list[range], note: str) -> Job:
    return dataclasses.replace(job, cut=cut, notes=(*job.notes, note))


def _note(cut: Sequence[range], machines: Sequence[LayerCosts], ranks: int) -> str:
    seconds = [stage_costs(costs, cut)[k] for k, costs in enumerate(machines)]
    stages = ", ".join(f"{1e3 * s:.1f} ms in stage {k} on rank {k % ranks}" for k, s in enumerate(seconds))
    whole = [1e3 * (sum(costs.layers) + costs.head) for costs in machines[:ranks]]
    alone = ", ".join(f"{ms:.1f} ms on rank {r}" for r, ms in enumerate(whole))
    sizes = _text([len(part) for part in cut])
    return f"cut {sizes} as measured: a micro-batch takes {stages}; the whole model would take {alone}"


def _text(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))
