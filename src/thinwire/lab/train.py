"""One rank of a fine-tuning run: the loop, from the first evaluation to the saved model."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.lab import resume
from thinwire.lab.books import Books
from thinwire.lab.config import TrainConfig
from thinwire.lab.config_checks import flag
from thinwire.lab.export import export_model
from thinwire.lab.job import Job, prepare
from thinwire.lab.setup import World, build_schedule, build_stages, join, pick_threads
from thinwire.lab.telemetry import StepReport, Telemetry, report_of
from thinwire.types import InputError


def run_rank(config: TrainConfig) -> None:
    """Run this process's rank of ``config``; the environment says which (torchrun's variables).

    Errors: ``ThinwireError`` of any kind; whatever happens, rank 0 leaves a readable record.
    """
    torch.set_num_threads(pick_threads(config))
    job = prepare(config)
    torch.manual_seed(config.seed)
    world = join(job)
    try:
        same_everywhere(job, world)
        _with_books(job, world)
    except BaseException:
        world.abandon()  # or the others would wait for this rank until the links' deadline
        raise
    world.close()


def _with_books(job: Job, world: World) -> None:
    books = Books(job, world)
    try:
        Run(job, world, books).go()
        books.close("done")
    except (KeyboardInterrupt, SystemExit) as e:
        books.close("interrupted" if isinstance(e, KeyboardInterrupt) else "failed")
        raise
    except BaseException as e:
        books.close("failed", str(e))
        raise


def same_everywhere(job: Job, world: World) -> None:
    """Raise ``InputError`` unless all ranks were started with the same options and hold the same text."""
    tokens = hashlib.blake2b(job.train.numpy().tobytes() + job.heldout.numpy().tobytes(), digest_size=16)
    mine = {k: v for k, v in job.config.to_dict().items() if k not in resume.FREE}
    mine |= {"link": job.config.link, "resume": job.config.resume, "save_model": job.config.save_model}
    mine |= {name: getattr(job.config, name) for name in ("checkpoint_every", "eval_every")}
    mine |= {"data": tokens.hexdigest()}
    ranks = Telemetry(world, job.config.deadline).agree(b"K", mine, "its options")
    for rank, other in enumerate(ranks):
        for name, value in ranks[0].items():
            if other.get(name) != value:
                what = f"{value!r} on rank 0 but {other.get(name)!r} on rank {rank}"
                what = f"not the same text on rank 0 and rank {rank}" if name == "data" else what
                raise InputError(f"{flag(name)} is {what}; start all ranks with the same")


class Run:
    """Stages, optimiser and schedule of one rank, and the loop over them."""

    def __init__(self, job: Job, world: World, books: Books) -> None:
        self.job, self.world, self.books = job, world, books
        self.config = job.config
        books.phase("loading the model")
        self.stages = build_stages(job, world)
        self.schedule = build_schedule(job, self.stages)
        self.parameters = [p for s in self.stages for p in s.submod.parameters()]
        self.optimiser = torch.optim.AdamW(
            self.parameters, self.config.learning_rate, weight_decay=self.config.weight_decay, fused=True
        )
        self.telemetry = Telemetry(world, self.config.deadline)
        self._last_report: StepReport | None = None

    @property
    def has_first(self) -> bool:
        return self.world.rank == 0

    @property
    def has_last(self) -> bool:
        return self.world.rank == self.world.size - 1

    def go(self) -> None:
        """Train, evaluate, save."""
        done = self._resume()
        if not done:
            self._evaluate(0)
        self.telemetry.agree(b"go", 0, "the start of training")
        self._steps(done)
        self._evaluate(self.job.steps)
        self.books.finish(self._final_reports())
        if self.config.save_model:
            self.books.phase("saving the model")
            export_model(self.job, self.world, self.stages, self.telemetry)

    def _steps(self, done: int) -> None:
        for step, ids in enumerate(self.job.batches.starting_at(done), done + 1):
            self.books.watch_links()
            start = time.perf_counter()
            report = self._step(step, ids)
            self._collect()
            self.books.took(time.perf_counter() - start)
            self._last_report = report
            self._now_and_then(step)
        self._collect()

    def _now_and_then(self, step: int) -> None:
        every, last = self.config.eval_every, step == self.job.steps
        if every and step % every == 0 and not last:
            self._collect()
            self._evaluate(step)
        every = self.config.checkpoint_every
        if every and step % every == 0:
            self._collect()
            self.books.phase("writing a checkpoint")
            totals = self.books.totals(self.world)
            resume.save(
                Path(self.config.out), step, self.world.rank, self.stages, self.optimiser, self.config, totals
            )

    def _step(self, step: int, ids: Tensor) -> StepReport:
        block = self.job.train[ids]
        if self.has_first:
            self.stages[0].begin(ids, self.config.microbatches)
        loss = self._through(self.schedule.step, block)
        start = time.perf_counter()
        self._clip()
        self._set_lr(step)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        report = report_of(self.world.rank, step, loss, self.stages)
        report.compute_s += time.perf_counter() - start
        self.telemetry.report(report)
        return report

    def _through(self, run: Any, block: Tensor) -> float | None:
        """Pass one batch [B, L + 1] through the pipeline; return the loss on the last rank."""
        losses: list[Tensor] = []
        inputs = (block[:, :-1].contiguous(),) if self.has_first else ()
        if self.has_last:
            run(*inputs, target=block[:, 1:].contiguous(), losses=losses)
        else:
            run(*inputs)
        return sum(v.detach().item() for v in losses) / len(losses) if losses else None

    def _clip(self) -> None:
        limit = self.config.grad_clip
        if not limit:
            return
        grads = [p.grad for p in self.parameters if p.grad is not None]
        own = torch.nn.utils.get_total_norm(grads).item() if grads else 0.0
        norm = math.sqrt(self.telemetry.squared_norm(own * own))
        if norm > limit and math.isfinite(norm):
            torch._foreach_mul_(grads, limit / (norm + 1e-6))

    def _set_lr(self, step: int) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.config, step, self.job.steps)

    def _collect(self) -> None:
        """On rank 0, book the last step once the others' reports of it are here."""
        if self.world.rank == 0 and self._last_report is not None:
            reports = self.telemetry.reports(self._last_report)
            lr = learning_rate(self.config, self._last_report.step, self.job.steps)
            self.books.step(reports, lr)
        self._last_report = None

    def _evaluate(self, step: int) -> None:
        """Evaluate after ``step`` steps, on held-out text and on a slice of what the run trains on."""
        if not self.config.eval_samples:
            return
        self.books.phase("evaluating")
        heldout, seen = self.job.eval_blocks()
        with self._unshaped(), torch.no_grad():
            losses = [self._mean_loss(blocks) for blocks in (heldout, seen)]
        for s in self.stages:
            s.tally.take()
        found = self.telemetry.gather(b"E", losses, "the evaluation losses")
        if found:
            self.books.evaluated(step, *found[-1])

    def _mean_loss(self, blocks: Tensor) -> float | None:
        losses = [self._through(self.schedule.eval, b) for b in blocks.split(self.config.batch)]
        known = [v for v in losses if v is not None]
        return sum(known) / len(known) if known else None

    @contextlib.contextmanager
    def _unshaped(self) -> Iterator[None]:
        """Let evaluation pass at full speed: it is not part of the run that is measured."""
        with contextlib.ExitStack() as stack:
            for peer in self.world.peers.values():
                stack.enter_context(peer.lifted())
            yield
        self.telemetry.agree(b"U", 0, "the end of the evaluation")
        for peer in self.world.peers.values():
            peer.reliable.forget_estimate()  # what was measured meanwhile is another link's

    def _resume(self) -> int:
        """Load the newest checkpoint that every rank has; return its step, or 0."""
        if not self.config.resume:
            return 0
        out, rank = Path(self.config.out), self.world.rank
        saved = self.telemetry.agree(b"C", resume.steps_saved(out, rank), "the list of checkpoints")
        common = set(saved[0]).intersection(*saved[1:])
        if not common:
            raise InputError(
                f"--resume: no checkpoint of all ranks in {out}; leave --resume out to start anew"
            )
        step = max(common)
        totals = resume.load(out, step, rank, self.stages, self.optimiser, self.config)
        self.telemetry.agree(b"L", step, "the checkpoint to be loaded")
        self.books.resumed(step, totals)
        return step

    def _final_reports(self) -> list[dict[str, Any]] | None:
        return self.telemetry.gather(b"Z", self.books.totals(self.world), "the final counts")


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of ``step``, counted from 1.

    >>> learning_rate(TrainConfig(lr=1.0, warmup=2), 1, 10)
    0.5
    """
    peak = config.learning_rate
    if step <= config.warmup:
        return peak * step / config.warmup
    done = (step - 1 - config.warmup) / max(1, steps - config.warmup)
    if config.lr_schedule == "linear":
        return peak * (1 - done)
    if config.lr_schedule == "cosine":
        return peak * (1 + math.cos(math.pi * done)) / 2
    return peak
