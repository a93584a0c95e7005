"""What rank 0 records: counts of several parts of a run, decisions in time, what the display alone says."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from run_records import metrics_of, write_run

from thinwire.links import LinkShape
from thinwire.links.tcp.counts import FALLBACK
from thinwire.runs.machine.compute import ON_CPU
from thinwire.runs.ranks.linkwatch import KERNEL_COUNTS, added
from thinwire.runs.ranks.world import World
from thinwire.runs.records.tensorboard import ABSENT, EventLog
from thinwire.runs.records.writer import read_metrics, write_json
from thinwire.types import LinkError
from thinwire.uses.kinds import load_run
from thinwire.uses.training.run import autopilot, training_launch
from thinwire.uses.training.run import training_rank as train
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.record import StepMetrics, TrainRecord
from thinwire.uses.training.run.stepper import StepReport
from thinwire.uses.training.run.training_recorder import TrainRecorder


def recorder(out: Path, **options: Any) -> TrainRecorder:
    config = TrainConfig(model="gpt2-lab", recipe="fp32", out=str(out), **options)
    job: Any = SimpleNamespace(
        config=config, spec="fp32", shape=LinkShape(), notes=(), steps=9, compute=ON_CPU
    )
    world = World(0, 2, {})
    return TrainRecorder(job, world)


@pytest.mark.parametrize("options", [{}, {"tensorboard": False}, {"quiet": True}])
def test_event_files_that_cannot_be_are_noted_on_the_display_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    made = recorder(tmp_path, **options)
    made.close("done")
    assert capsys.readouterr().err.count(ABSENT) == (0 if options else 1)
    assert made.record.notes == []


CARRIED: dict[str, Any] = {
    "source": 0,
    "destination": 1,
    "payload_bytes": 100,
    "wire_bytes": 120,
    "retransmitted_bytes": 2,
    "rtt_s": 0.01,
    "min_rtt_s": 0.01,
    "delivery_bytes_s": 1.0,
    "congestion": "cubic",
    "counted": KERNEL_COUNTS,
}
UNKNOWN = dict.fromkeys(("wire_bytes", "retransmitted_bytes", "rtt_s", "min_rtt_s", "delivery_bytes_s"))
UNCOUNTED = CARRIED | UNKNOWN | {"congestion": None, "counted": FALLBACK}


def test_what_links_carried_before_a_resume_is_added() -> None:
    doubled = CARRIED | {"payload_bytes": 200, "wire_bytes": 240, "retransmitted_bytes": 4}
    assert added([CARRIED], [CARRIED]) == [doubled]
    assert added([], [CARRIED]) == [CARRIED]


def test_a_part_without_a_step_takes_nothing_away() -> None:
    assert added([CARRIED], [UNCOUNTED | {"payload_bytes": 0}]) == [CARRIED]


@pytest.mark.parametrize("parts", [(CARRIED, UNCOUNTED), (UNCOUNTED, CARRIED)])
def test_a_part_that_nobody_counted_leaves_no_sum(parts: tuple[dict[str, Any], dict[str, Any]]) -> None:
    (found,) = added([parts[0]], [parts[1]])
    assert (found["payload_bytes"], found["counted"]) == (200, FALLBACK)
    assert found["wire_bytes"] is None and found["retransmitted_bytes"] is None


def test_after_a_resume_event_files_have_each_step_once(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (first, second), lines = (EventLog(tmp_path) for _ in range(2)), metrics_of(6, (8.0, 8.0))
    for line in lines[:5]:
        first.write(line.scalars(), line.step)
    first.close()
    second.resumed(3)
    for line in lines[3:]:
        second.write(line.scalars(), line.step)
    second.close()
    found = reader.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert [e.step for e in found.Scalars("loss/train")] == [1, 2, 3, 4, 5, 6]


def test_a_killed_run_s_record_is_made_of_the_steps_it_booked(tmp_path: Path) -> None:
    whole = write_run(tmp_path, "direct:bits=4", (4.5, 4.5), steps=7)
    killed = TrainRecord(recipe=whole.recipe, config=whole.config)
    killed.recount(read_metrics(tmp_path, StepMetrics))
    assert (killed.totals, killed.loss.train) == (whole.totals, whole.loss.train)
    for way in ("forward", "backward"):
        assert killed.bytes[way] == whole.bytes[way]
        assert killed.bits_per_value[way] == pytest.approx(4.5, rel=1e-5)
        assert killed.bytes[f"raw_{way}"] == pytest.approx(killed.bytes[way] * 32 / 4.5, rel=1e-5)


@pytest.mark.parametrize(("since", "steps"), [(-60.0, 7), (60.0, 0)])
def test_steps_of_the_part_before_a_resume_are_not_counted(tmp_path: Path, since: float, steps: int) -> None:
    """A run that goes on writes its steps anew, from its first one on."""
    record = write_run(tmp_path, "fp32", steps=7, status="running")
    record.config |= {"batch": 4, "seq": 128}
    record.totals["steps"] = 0
    write_json(tmp_path / "run.json", record.to_dict() | {"status": "running"})
    started = (tmp_path / "metrics.jsonl").stat().st_mtime + since
    os.utime(tmp_path / "run.json", (started + 1, started + 1))
    training_launch._close_record(tmp_path, LinkError("rank 0 was ended"), started, MagicMock(describe=dict))
    found = load_run(tmp_path)
    assert (found.status, found.totals["steps"]) == ("failed", steps)


def test_accuracies_are_recorded_and_stay_after_a_resume(tmp_path: Path) -> None:
    first, world = recorder(tmp_path, tensorboard=False, quiet=True), World(0, 1, {})
    for step, accuracy in ((0, 0.1), (4, 0.5)):
        first.evaluated(step, 2.0, 1.9, accuracy)
    totals = first.totals(world)
    first.close("failed")
    second = recorder(tmp_path, tensorboard=False, quiet=True, resume=True)
    second.resumed(5, json.loads(json.dumps(totals)))
    second.evaluated(9, 1.0, 0.9, 0.8, final=True)
    second.close("done")
    loss = load_run(tmp_path).loss
    assert (loss.accuracy_first, loss.accuracy_final) == (0.1, 0.8)
    assert [(e.step, e.accuracy) for e in loss.evaluations] == [(4, 0.5)]
    third = recorder(tmp_path, tensorboard=False, quiet=True, resume=True, eval_samples=3)
    third.resumed(5, json.loads(json.dumps(totals)))  # losses of other samples do not compare
    third.evaluated(9, 1.0, 0.9, 0.8, final=True)
    third.close("done")
    found = load_run(tmp_path)
    assert (found.loss.eval_first, found.loss.evaluations, found.loss.eval_final) == (None, [], 1.0)
    assert "--eval-samples was 16 up to step 5 and is 3 since then" in found.notes[-1]


def test_a_policy_is_told_the_step_that_follows() -> None:
    """A step late as a rule, at once before a checkpoint."""
    told: list[tuple[int, int]] = []
    run: Any = object.__new__(train.TrainingRank)
    run.config = TrainConfig(model="gpt2-lab", checkpoint_every=2)
    batches = SimpleNamespace(starting_at=lambda done: iter([torch.tensor([0])] * 4))
    run.world, run.job = World(0, 1, {}), SimpleNamespace(steps=4, batches=batches)
    run.stepper = SimpleNamespace(step=lambda step, *_: StepReport(0, step))
    run.telemetry = SimpleNamespace(world=run.world)
    run.autopilot = SimpleNamespace(decide=lambda step, coming, reports: told.append((step, coming)))
    run.recorder, run.synchroniser = MagicMock(), None
    run.recorder.step.return_value = 1.0
    run._reports, run._lag, run._save_checkpoint = deque(), 0, lambda step: None
    run._steps(0)
    assert told == [(1, 3), (2, 3), (3, 5), (4, 5)]


def test_nothing_is_decided_for_a_step_beyond_the_last() -> None:
    pilot: Any = autopilot.Autopilot.__new__(autopilot.Autopilot)
    pilot._job = SimpleNamespace(steps=4)
    assert pilot.decide(3, 5, [StepReport(0, 3)]) == []
