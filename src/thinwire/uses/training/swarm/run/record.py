"""The record of a swarm: its loss, its members and its rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.runs.options import Options
from thinwire.runs.records.run_record import RunRecord, UnitMetrics, about
from thinwire.uses.training.run.record import Loss
from thinwire.uses.training.swarm.run.options import SwarmConfig


@dataclass(kw_only=True)
class RoundMetrics(UnitMetrics):
    """One line of ``metrics.jsonl``: one round, which made a version of the model."""

    round: int = about("number of the round, from 1")
    deadline_s: float = about("the longest that it would have waited, seconds", 0.0)
    counted: int = about("updates that counted", 0)
    late: int = about("members that did not answer in time", 0)
    refused: int = about("updates that were refused, or came and did not count", 0)
    samples: int = about("samples that members trained on", 0)
    lr: float | None = about("learning rate of its local steps", None)

    @property
    def number(self) -> int:
        """Number of the round, from 1."""
        return self.round

    def sentence(self, loss: float | None) -> str:
        """Return in a line what the round came to; ``loss``: held-out, if it was evaluated."""
        parts = [f"{self.counted} members"]
        parts += [f"{self.late} late"] * (self.late > 0) + [f"{self.refused} refused"] * (self.refused > 0)
        named = f", held-out loss {loss:.3f}" if loss is not None else ""
        return f"round {self.round}: {', '.join(parts)}, {self.seconds:.1f} s{named}"


@dataclass
class MemberFigures:
    """What one member did; a name that came back is one member."""

    name: str = about("as it calls itself, else its number")
    joined_s: float = about("when it came first, seconds from the first round")
    left_s: float | None = about("when it was gone last; null while it is there", None)
    rounds: int = about("its updates that came in time and whole", 0)
    samples: int = about("samples that these were trained on", 0)
    up: int = about("bytes that it sent", 0)
    down: int = about("bytes that it was sent", 0)
    step_seconds: float | None = about("of a local step there, as said last", None)
    sends: float | None = about("bytes/s at which it sends, as measured last", None)
    weight: float = about("how much its last update counted: 1 in full, 0 not at all", 1.0)
    refused: list[str] = about("why updates were refused or did not count, one sentence each", make=list)
    spells: list[list[float | None]] = about(
        "when it was there: pairs of seconds, null for the end", make=list
    )


@dataclass
class RoundFigures:
    """One round."""

    number: int = about("number of the round, from 1")
    seconds: float = about("how long it took")
    deadline_s: float = about("the longest that it would have waited, seconds")
    counted: int = about("updates that counted")
    late: int = about("members that did not answer in time")
    refused: int = about("updates that were refused, or came and did not count")


@dataclass
class SwarmRecord(RunRecord):
    """The record of a model that whoever was there trained."""

    METRICS: ClassVar[type[UnitMetrics]] = RoundMetrics
    CONFIG: ClassVar[type[Options]] = SwarmConfig
    KEYS: ClassVar[dict[str, str]] = {
        "totals.seconds": "wall-clock seconds of all rounds",
        "totals.rounds": "rounds that made a version",
        "totals.samples": "samples that members trained on, of updates that came in time",
        "totals.counted": "those of them whose updates counted: not those of members that lied",
        "bytes.up": "bytes that members sent of updates, headers included",
        "bytes.down": "bytes that members were sent of versions, their work included",
        "bytes.kit": "bytes of config and tokenizer, each time a member fetched them",
        "bytes.raw_up": "what the updates would have been as plain fp32 values",
        "bytes.raw_down": "what the versions would have been as plain fp32 values",
    }
    FREE: ClassVar[frozenset[str]] = RunRecord.FREE | {
        *(
            "listen",
            "members",
            "gather",
            "patience",
            "ban",
            "resume",
            "save_model",
            "eval_every",
            "until_loss",
        ),
    }

    kind: str = about("`swarm`", "swarm")
    unit: str = about("`round`: a round, which makes a version of the model", "round")
    loss: Loss = about("losses: mean cross-entropies in nats a token", make=Loss)
    clean_loss: float | None = about(
        "held-out loss of the run beside it, in which all stayed and none lied, once as many samples counted",
        None,
    )
    members: list[MemberFigures] = about("one object a member", make=list)
    rounds: list[RoundFigures] = about("one object a round", make=list)
    equal: dict[str, str] = about(
        "what those held who were in the last round, by name: version and checksum, which are all the same",
        make=dict,
    )
