"""What the first stage leaves of the texts that it continued: a line each, and their medians. No words."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from thinwire.runs.machine.processor import environment, peak_rss_bytes, pick_threads
from thinwire.runs.ranks.launcher import link_of
from thinwire.runs.records.run_record import PeakMemory, RecipeText
from thinwire.runs.records.writer import RunWriter
from thinwire.uses.serving.recipes import parse_serving
from thinwire.uses.serving.run.record import ServingRecord, TextMetrics
from thinwire.uses.serving.run.stage_program import FirstStage
from thinwire.uses.serving.text_requests import Text

LATELY = 1000  # texts that the medians are of
STREAM = "stages"


class TextRecorder:
    """Keep the record of a run in which texts come and go. ``ended`` is called by the engine's thread."""

    def __init__(self, first: FirstStage) -> None:
        config, self._first = first.config, first
        device = first.engine.work.device
        self.record = ServingRecord(
            recipe=RecipeText(config.recipe, parse_serving(config.recipe).spec),
            config=config.to_dict(),
            environment=environment(config.dtype, pick_threads(config), device),
            link=link_of(config),
        )
        self.record.totals["tokens"] = 0.0
        self._writer = RunWriter(Path(config.out), self.record)
        self._lately: deque[TextMetrics] = deque(maxlen=LATELY)
        self._texts = 0
        self._before, self._tokens = first.sent(), first.engine.work.spent.tokens

    def ended(self, text: Text) -> None:
        """Add a text that has ended, whoever ended it; one without a token is left out."""
        if not text.made:
            return
        self._texts += 1
        line = line_of(self._texts, text)
        self._lately.append(line)
        self._writer.add(line)
        self.record.totals["tokens"] += line.tokens
        self._figures()
        self._writer.write()

    def close(self, status: str) -> None:
        """Write the record for the last time."""
        self._figures()
        self._writer.close(status)

    def _figures(self) -> None:
        record, work = self.record, self._first.engine.work
        if self._lately:
            record.sum_up(self._lately)
        record.memory = PeakMemory([peak_rss_bytes()])
        if self._first.ring.world.peers:
            values = (work.spent.tokens - self._tokens) * work.width
            record.sent(STREAM, self._first.sent() - self._before, values)


def line_of(number: int, text: Text) -> TextMetrics:
    """Return what a text took."""
    times, made = text.times, len(text.made)
    behind = times.last - times.first
    names = "rounds", "drafted", "accepted", "reused"
    figures: dict[str, Any] = {name: getattr(text, name) for name in names}
    return TextMetrics(
        text=number,
        seconds=times.last - times.came,
        prompt=len(text.request.prompt),
        tokens=made,
        first_token_s=times.first - times.came,
        tokens_per_second=(made - 1) / behind if made > 1 and behind > 0 else 0.0,
        **figures,
    )
