"""The record of rollouts elsewhere: each batch with the age of the weights that made it, and the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.runs import options as shared
from thinwire.runs.options import Options, option
from thinwire.runs.records.run_record import RunRecord, UnitMetrics, about

STREAMS = ("weights", "prompts", "samples")


@dataclass(frozen=True)
class RolloutConfig(Options):
    """How a pool of rollout workers is set."""

    out: str = option("runs/rollouts", "", "Folder of the run, which replaces one there.", metavar="DIR")
    host: str = shared.listen_host("127.0.0.1")
    port: int = shared.listen_port(0)
    max_age: int | None = option(
        None, "", "By how many versions a worker may be behind before it waits; null: any age.", least=0
    )
    timeout: float = shared.seconds(600.0, "Seconds for a batch.")


@dataclass
class PartFigures:
    """What one worker made of a batch."""

    worker: str = about("who made it")
    version: int = about("the version that it was made with")
    behind: int = about("how many versions the trainer had published since")
    age_s: float = about("seconds since that version was published, when the part was made")
    waited_s: float = about("seconds that the worker waited for weights, 0 unless its own were too old")
    samples: int = about("samples that it made")
    tokens: int = about("their tokens")
    seconds: float = about("from its prompts' leaving to its samples' arrival")


@dataclass(kw_only=True)
class BatchMetrics(UnitMetrics):
    """One line of ``metrics.jsonl``: one batch."""

    batch: int = about("number of the batch, from 1")
    step: int | None = about("the trainer's step", None)
    version: int = about("the newest version when it was asked for")
    at: float = about("when it was asked for, seconds since the pool began")
    parts: list[PartFigures] = about("one object a part", make=list)

    @property
    def number(self) -> int:
        """Number of the batch, from 1."""
        return self.batch

    @property
    def samples(self) -> int:
        """Samples of all parts."""
        return sum(part.samples for part in self.parts)

    @property
    def tokens(self) -> int:
        """Their tokens."""
        return sum(part.tokens for part in self.parts)

    @property
    def busy(self) -> float:
        """Seconds of all its workers."""
        return sum(part.seconds for part in self.parts)

    @property
    def waited(self) -> float:
        """Those in which they waited for weights."""
        return sum(part.waited_s for part in self.parts)


@dataclass
class RolloutWorkerFigures:
    """What one worker did."""

    name: str = about("its number here, and where it dials from")
    spells: list[list[float | None]] = about(
        "when it was there: pairs of seconds, null for the end; a trainer hears of it while a batch is made",
        make=list,
    )
    parts: int = about("parts of batches that it made", 0)
    samples: int = about("samples of these", 0)
    tokens: int = about("their tokens", 0)
    seconds: float = about("seconds that these took it", 0.0)
    waited_s: float = about("those in which it waited for weights", 0.0)
    waits: int = about("how often it did", 0)
    behind: int = about("by how many versions it was behind at most", 0)
    age_s: float = about("the oldest weights that it used, seconds", 0.0)
    lost: int = about("prompts that went from it to others, because it was gone", 0)

    def add(self, part: PartFigures) -> None:
        """Count what it made."""
        self.parts += 1
        self.samples, self.tokens = self.samples + part.samples, self.tokens + part.tokens
        self.seconds, self.waited_s = self.seconds + part.seconds, self.waited_s + part.waited_s
        self.waits += part.waited_s > 0
        self.behind, self.age_s = max(self.behind, part.behind), max(self.age_s, part.age_s)


@dataclass
class RolloutsRecord(RunRecord):
    """The record of a trainer's rollouts, which workers elsewhere made."""

    METRICS: ClassVar[type[UnitMetrics]] = BatchMetrics
    CONFIG: ClassVar[type[Options]] = RolloutConfig
    FREE: ClassVar[frozenset[str]] = RunRecord.FREE | {"timeout"}
    KEYS: ClassVar[dict[str, str]] = {
        "totals.seconds": "seconds in which the trainer waited for batches",
        "totals.batches": "batches that are whole",
        "totals.elapsed": "seconds from the first batch's beginning to the last one's end",
        "totals.samples": "samples of all batches",
        "totals.tokens": "their tokens",
        "totals.busy": "seconds of all workers, from a part's prompts to its samples",
        "totals.waited": "those of them in which workers waited for weights",
        "bytes.weights": "bytes that the publisher sent to all followers by the end of the last batch; "
        "left out where it is not known",
        "bytes.prompts": "bytes sent to workers while batches were made, headers of ours included",
        "bytes.samples": "bytes that came from workers then, headers of ours included",
    }

    kind: str = about("`rollouts`", "rollouts")
    unit: str = about("`batch`: a batch of samples", "batch")
    workers: list[RolloutWorkerFigures] = about(
        "one object a worker, in the order in which they came", make=list
    )

    def count(self, done: UnitMetrics) -> None:
        """Add a batch that is done to the totals."""
        if not isinstance(done, BatchMetrics):
            raise TypeError(f"a batch is counted, not {type(done).__name__}")
        totals = self.totals
        for name in ("samples", "tokens", "busy", "waited"):
            totals[name] = totals.get(name, 0) + getattr(done, name)
        totals["batches"], totals["seconds"] = done.batch, totals["seconds"] + done.seconds
        for stream, nbytes in done.bytes.items():
            self.bytes[stream] = self.bytes.get(stream, 0) + nbytes

    def worker(self, name: str) -> RolloutWorkerFigures:
        """Return what is known of a worker, who may be new."""
        found = next((worker for worker in self.workers if worker.name == name), None)
        if found is None:
            found = RolloutWorkerFigures(name)
            self.workers.append(found)
        return found
