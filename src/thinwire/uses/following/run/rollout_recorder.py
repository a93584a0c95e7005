"""The trainer's record of rollouts elsewhere, kept while they are made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

from thinwire.runs.machine.processor import environment, peak_rss_bytes, resident_peak
from thinwire.runs.records.folder_lock import holding
from thinwire.runs.records.run_record import PeakMemory, RecipeText, status_of
from thinwire.runs.records.writer import REPORT, RunWriter, forget
from thinwire.types import InputError, require
from thinwire.uses.following.hosts.rollout_batch import RolloutBatch
from thinwire.uses.following.published_tensors import tensors_of
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.run.rollout_record import (
    BatchMetrics,
    PartFigures,
    RolloutConfig,
    RolloutsRecord,
)


class RolloutRecorder:
    """Keep the run record of a pool in the folder ``out``, for ``thinwire report``.

    Give it to one pool: ``RolloutPool(..., record=RolloutRecorder("runs/grpo", publisher))``. ``publisher``:
    whose bytes are counted as those of weights. After each batch ``metrics.jsonl`` has its line, and
    ``run.json`` is replaced as a whole. Errors: ``InputError`` for a folder that another run holds;
    ``OSError`` where it cannot be written.
    """

    def __init__(self, out: str | Path, publisher: Publisher | None = None) -> None:
        self.out, self._publisher = Path(out), publisher
        self._writer: RunWriter | None = None

    def begin(self, config: Mapping[str, Any]) -> None:
        """Begin a record of a pool that is set so, in the place of one that is there."""
        require(self._writer is None, InputError, f"{self.out} has a pool's record; make a recorder for each")
        self._began = monotonic()
        self._first: float | None = None  # when the first batch began, seconds since then
        self._weights = self._sent()
        self.record = RolloutsRecord(
            recipe=RecipeText("rollouts"),
            config=RolloutConfig.from_dict({"out": str(self.out), **config}).to_dict(),
            environment=_environment(self._publisher),
        )
        with ExitStack() as held:
            held.enter_context(holding(self.out, "out"))
            forget(self.out, REPORT)
            self._writer = RunWriter(self.out, self.record)
            self._held = held.pop_all()

    def came(self, worker: str) -> None:
        """Note that a worker is there."""
        self.record.worker(worker).spells.append([self._now(), None])
        self._write()

    def went(self, worker: str, prompts: int) -> None:
        """Note that a worker is gone, and how many prompts went from it to others."""
        found = self.record.worker(worker)
        found.spells[-1][1] = self._now()
        found.lost += prompts
        self._write()

    def note(self, text: str) -> None:
        """Note a sentence, once."""
        self._open().note(text)
        self._write()

    def made(self, batch: RolloutBatch) -> None:
        """Note a batch that is whole."""
        weights = self._sent()
        own = {"prompts": batch.sent, "samples": batch.received}
        if weights is not None and self._weights is not None:
            own["weights"] = weights - self._weights
        self._weights = weights
        at = batch.began - self._began
        parts = [
            PartFigures(a.worker, a.version, a.behind, a.age, a.waited, a.samples, a.tokens, a.seconds)
            for a in batch.parts
        ]
        self._open().add(
            BatchMetrics(
                seconds=batch.seconds,
                bytes=own,
                batch=batch.number,
                step=batch.step,
                version=batch.version,
                at=at,
                parts=parts,
            )
        )
        for part in parts:
            self.record.worker(part.worker).add(part)
        self._first = at if self._first is None else self._first
        self.record.totals["elapsed"] = at + batch.seconds - self._first
        self._write()

    def end(self, error: BaseException | None) -> None:
        """Write the record for good."""
        writer = self._open()
        with self._held:
            self.record.memory = PeakMemory([resident_peak(os.getpid()) or peak_rss_bytes()])
            writer.close("done" if error is None else status_of(error))

    def _open(self) -> RunWriter:
        if self._writer is None:
            raise InputError("this recorder has no pool yet; give it to one: RolloutPool(..., record=it)")
        return self._writer

    def _write(self) -> None:
        self._open().write()

    def _now(self) -> float:
        return monotonic() - self._began

    def _sent(self) -> int | None:
        return self._publisher.sent if self._publisher is not None else None


def _environment(publisher: Publisher | None) -> dict[str, Any]:
    """Return versions, machine, and the device that what is published lies on; the rest is not known."""
    device = next(iter(tensors_of(publisher.source).values())).device if publisher is not None else None
    there = environment("fp32", 0, device)
    unknown = {"dtype": None, "dtype_reason": "the trainer's own", "threads": None}
    return there | unknown | ({} if device is not None else {"devices": []})
