"""A run of the trainer whose folder is not kept."""

from __future__ import annotations

import tempfile
from typing import Any

from thinwire.runs.records.writer import load_run, read_metrics
from thinwire.uses.training.run.config import TrainConfig
from thinwire.uses.training.run.launch import launch
from thinwire.uses.training.run.record.schema import StepMetrics, TrainRecord


def trained(options: dict[str, Any], kept: str = "") -> tuple[TrainRecord, list[StepMetrics]]:
    """Train, and return the record and the steps; ``kept``: the folder that the record is to name."""
    with tempfile.TemporaryDirectory() as out:
        launch(TrainConfig(**(options | {"out": out, "quiet": True})))
        record, steps = load_run(out, TrainRecord), read_metrics(out, StepMetrics)
    record.config["out"] = kept or out
    return record, steps
