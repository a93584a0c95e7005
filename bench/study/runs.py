"""Runs for a study: of the trainer, its folder not kept, and of a bench's own ranks until they have timed."""

from __future__ import annotations

import tempfile
from typing import Any

from thinwire.runs.ranks.launcher import launcher_of
from thinwire.runs.ranks.run_config import RunConfig
from thinwire.runs.ranks.supervise import Workers
from thinwire.runs.records.writer import load_run, read_metrics
from thinwire.types import MeasurementError
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.record import StepMetrics, TrainRecord
from thinwire.uses.training.run.training_launch import launch

APART = {"save_model": False, "tensorboard": False, "quiet": True}  # what no study wants


def trained(options: dict[str, Any], kept: str = "") -> tuple[TrainRecord, list[StepMetrics]]:
    """Train, and return the record and the steps; ``kept``: the folder that the record is to name."""
    with tempfile.TemporaryDirectory() as out:
        launch(TrainConfig(**(options | APART | {"out": out})))
        record, steps = load_run(out, TrainRecord), read_metrics(out, StepMetrics)
    record.config["out"] = kept or out
    return record, steps


def replicated(recipe: str, link: str, options: dict[str, Any]) -> tuple[TrainRecord, list[StepMetrics]]:
    """Train two replicas, and return the record and the steps."""
    return trained(options | {"replicas": 2, "replica_recipe": recipe, "link": link})


def timed(program: str, seconds: float, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Run ``MODULE:FUNCTION`` on all ranks, and return what the first says it timed, and the network.

    Errors: ``LinkError`` after so many ``seconds``; ``MeasurementError`` where the machine kept no time.
    """
    with tempfile.TemporaryDirectory() as out:
        found, network = session(program, seconds, TrainConfig(**(options | APART | {"out": out})))
    if not network.get("valid", True):
        raise MeasurementError("this machine was too busy to keep time")
    return found, network


def session(program: str, seconds: float, config: RunConfig) -> tuple[Any, dict[str, Any]]:
    """Return what ``timed`` does, of options of any kind, whether or not the machine kept time."""
    with launcher_of(config) as place, Workers(place, program) as ranks:
        for _ in range(config.ranks):
            ranks.start(config)
        found = ranks.until("timed", 0, seconds)["found"]
        ranks.wait()
        return found, place.describe()
