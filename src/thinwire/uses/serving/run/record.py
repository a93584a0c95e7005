"""The record of a model that is served: how soon its tokens come, and whether they are one machine's."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from thinwire.runs.options import Options
from thinwire.runs.records.run_record import RunRecord, UnitMetrics, about
from thinwire.uses.serving.run.options import MeasuredConfig


@dataclass(kw_only=True)
class TextMetrics(UnitMetrics):
    """One line of ``metrics.jsonl``: one text that was continued."""

    text: int = about("number of the text, from 1")
    prompt: int = about("tokens of its prompt", 0)
    tokens: int = about("tokens that were added", 0)
    first_token_s: float = about("seconds until the first of them", 0.0)
    tokens_per_second: float = about("of those behind the first", 0.0)
    rounds: int = about("trips around the stages that gave tokens", 0)
    drafted: int = about("tokens that were proposed", 0)
    accepted: int = about("of them that were right", 0)
    reused: int = about("tokens of its prompt that were copied from an earlier text", 0)

    @property
    def number(self) -> int:
        """Number of the text, from 1."""
        return self.text


@dataclass
class ServingRecord(RunRecord):
    """The record of texts that one way of serving continued."""

    METRICS: ClassVar[type[UnitMetrics]] = TextMetrics
    CONFIG: ClassVar[type[Options]] = MeasuredConfig
    KEYS: ClassVar[dict[str, str]] = {
        "totals.seconds": "seconds of the texts that were timed, one after another",
        "totals.texts": "texts that were timed",
        "totals.tokens": "tokens that were added to them",
        "bytes.stages": "bytes that all stages sent each other for them, headers included",
        "bytes.raw_stages": "what the hidden states of their tokens would have been as plain fp32 values",
    }
    FREE: ClassVar[frozenset[str]] = RunRecord.FREE | {"stages", "drafts", "emulate", "cut"}

    kind: str = about("`serving`", "serving")
    unit: str = about("`text`: a text that was continued", "text")
    first_token_s: float | None = about("seconds until the first token, the median of the texts", None)
    tokens_per_second: float | None = about("tokens a second behind the first, the median of the texts", None)
    equal_tokens: float | None = about(
        "share of the likeliest tokens that are those of `one`, up to the first that differs", None
    )
    accepted: float | None = about("drafts that were right, a trip", None)
    shown: list[str] = about("how the prompts go on by their likeliest tokens", make=list)

    def sum_up(self, lines: Collection[TextMetrics]) -> None:
        """Set the figures that are of these texts, one at least."""
        self.first_token_s = statistics.median(line.first_token_s for line in lines)
        self.tokens_per_second = statistics.median(line.tokens_per_second for line in lines)
        self.accepted = sum(line.accepted for line in lines) / max(1, sum(line.rounds for line in lines))
