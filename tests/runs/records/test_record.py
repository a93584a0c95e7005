"""The run record: readable at any moment, validated when read, documented field by field."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_records import metrics_of, record_of, write_run

from thinwire.runs.records.run_record import RecipeText
from thinwire.runs.records.writer import METRICS, RUN, RunWriter, read_metrics, write_json
from thinwire.types import InputError
from thinwire.uses.kinds import load_run
from thinwire.uses.training.run.record import Evaluation, StepMetrics, TrainRecord


def test_round_trip(tmp_path: Path):
    written = write_run(tmp_path, "fp32", boundaries=2)
    assert load_run(tmp_path) == written
    assert load_run(tmp_path / RUN) == written
    assert [m.loss for m in read_metrics(tmp_path, StepMetrics)] == written.loss.train


def test_readable_while_running(tmp_path: Path):
    writer = RunWriter(tmp_path, TrainRecord(recipe=RecipeText("fp32")))
    assert load_run(tmp_path).status == "running"
    first, second = metrics_of(2, (32.0, 32.0))
    writer.add(first)
    assert read_metrics(tmp_path, StepMetrics) == [first]
    writer.add(second)
    assert read_metrics(tmp_path, StepMetrics) == [first, second]
    writer.close("interrupted")
    writer.close("done")
    assert load_run(tmp_path).status == "interrupted"
    with pytest.raises(ValueError, match="closed"):
        writer.add(first)


def test_readable_after_sigkill(tmp_path: Path):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from run_records import metrics_of\n"
        "from thinwire.runs.records.run_record import RecipeText\n"
        "from thinwire.runs.records.writer import RunWriter\n"
        "from thinwire.uses.training.run.record import TrainRecord\n"
        "w = RunWriter(sys.argv[1], TrainRecord(recipe=RecipeText('fp32')))\n"
        "for m in metrics_of(5, (32., 32.)): w.add(m)\n"
        "print('ready', flush=True); time.sleep(600)\n"
    )
    tests = str(Path(__file__).parents[2] / "shared")
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), tests], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert len(read_metrics(tmp_path, StepMetrics)) == 5
    assert load_run(tmp_path).status == "running"


def test_a_last_line_cut_short_is_dropped_but_no_other(tmp_path: Path):
    write_run(tmp_path, "fp32", steps=4)
    file = tmp_path / METRICS
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines)[:-10])
    assert [m.step for m in read_metrics(tmp_path, StepMetrics)] == [1, 2, 3]
    file.write_text("\n".join([lines[0][:-10], *lines[1:]]))
    with pytest.raises(InputError, match="line 1 of"):
        read_metrics(tmp_path, StepMetrics)


def test_resume_keeps_the_lines_before_the_checkpoint(tmp_path: Path):
    write_run(tmp_path, "fp32", steps=6, status="interrupted")
    before = read_metrics(tmp_path, StepMetrics)
    writer = RunWriter(tmp_path, TrainRecord(recipe=RecipeText("fp32")), done=4)
    again = dataclasses.replace(before[4], loss=9.0)
    writer.add(again)
    writer.close("done")
    assert read_metrics(tmp_path, StepMetrics) == [*before[:4], again]
    assert load_run(tmp_path).loss.train == [m.loss for m in [*before[:4], again]]


def test_a_resume_that_fails_early_costs_no_numbers(tmp_path: Path):
    write_run(tmp_path, "fp32", steps=6, status="interrupted")
    before = read_metrics(tmp_path, StepMetrics)
    record = TrainRecord(recipe=RecipeText("fp32"), config={"resume": True})
    RunWriter(tmp_path, record).close("running")
    assert read_metrics(tmp_path, StepMetrics) == before
    writer = RunWriter(tmp_path, record, done=4)
    assert record.loss.train == [m.loss for m in before[:4]]
    writer.add(before[4])
    assert read_metrics(tmp_path, StepMetrics) == before[:5]
    writer.close("done")


def test_evaluations_on_the_way_are_kept(tmp_path: Path):
    writer = RunWriter(tmp_path, TrainRecord(recipe=RecipeText("fp32")))
    writer.record.loss.evaluations.append(Evaluation(10, 3.5, None))
    writer.close("done")
    assert load_run(tmp_path).loss.evaluations == [Evaluation(10, 3.5, None)]


def test_a_new_run_replaces_the_old_lines(tmp_path: Path):
    write_run(tmp_path, "fp32", steps=6)
    write_run(tmp_path, "thinwire", steps=2)
    assert len(read_metrics(tmp_path, StepMetrics)) == 2
    assert load_run(tmp_path).recipe.name == "thinwire"


def test_losses_that_are_not_finite_stay_valid_json(tmp_path: Path):
    (line,) = metrics_of(1, (32.0, 32.0))
    writer = RunWriter(tmp_path, TrainRecord(recipe=RecipeText("fp32")))
    writer.add(dataclasses.replace(line, loss=math.inf))
    writer.record.loss.eval_final = math.nan
    writer.close("done")
    assert "NaN" not in (tmp_path / RUN).read_text()
    assert json.loads((tmp_path / METRICS).read_text())["loss"] is None
    assert math.isnan(read_metrics(tmp_path, StepMetrics)[0].loss)
    assert math.isnan(load_run(tmp_path).loss.train[0])
    assert load_run(tmp_path).loss.eval_final is None


def test_writing_leaves_the_old_file_on_failure(tmp_path: Path):
    file = tmp_path / "x.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file]


def broken(change) -> str:
    values = record_of("fp32", metrics_of(2, (32.0, 32.0)), (32.0, 32.0), 3.5).to_dict()
    change(values)
    return json.dumps(values)


BROKEN = [
    ("", "not valid JSON"),
    ("[]", "the record is not an object"),
    (broken(lambda v: v.pop("recipe")), "'recipe'"),
    (broken(lambda v: v.pop("bytes")), "'bytes'"),
    (broken(lambda v: v["recipe"].pop("name")), "'recipe.name'"),
    (broken(lambda v: v["bytes"].update(forward="many")), "'bytes.forward' is 'many'"),
    (broken(lambda v: v["boundaries"][0].pop("direction")), r"'boundaries\[0\].direction'"),
    (broken(lambda v: v["loss"].update(train=[1.0, "x"])), r"'loss.train\[1\]'"),
    (broken(lambda v: v.update(totals=3)), "'totals' is '3', not of type dict"),
    (broken(lambda v: v["bytes"].update(forward=10**400)), r"'bytes.forward' is 1000.*beyond 2\*\*63"),
    (broken(lambda v: v["totals"].update(seconds=-(1 << 63))), r"'totals.seconds' is .*beyond 2\*\*63"),
    (broken(lambda v: v.update(schema="thinwire-run/9")), "schema 'thinwire-run/9'"),
]


@pytest.mark.parametrize(("text", "words"), BROKEN, ids=[w for _, w in BROKEN])
def test_broken_records_name_the_field(tmp_path: Path, text: str, words: str):
    (tmp_path / RUN).write_text(text)
    with pytest.raises(InputError, match=words) as e:
        load_run(tmp_path)
    assert "\n" not in str(e.value)
    assert RUN in str(e.value)


def test_missing_record(tmp_path: Path):
    with pytest.raises(InputError, match=r"no run record at .*run\.json"):
        load_run(tmp_path)
    with pytest.raises(InputError, match="no metrics at"):
        read_metrics(tmp_path, StepMetrics)


def test_keys_of_later_versions_are_ignored(tmp_path: Path):
    (tmp_path / RUN).write_text(broken(lambda v: v.update(colour="red")))
    assert load_run(tmp_path).recipe.name == "fp32"


def test_the_issue_s_fields_are_there(tmp_path: Path):
    write_run(tmp_path, "fp32")
    values = json.loads((tmp_path / RUN).read_text())
    asked = (
        "recipe.name recipe.spec config environment link.asked link.rate_bytes_s link.delay_s link.rtt_s "
        "totals.seconds totals.steps bytes.forward bytes.backward bytes.control bytes.raw_forward "
        "bytes.raw_backward "
        "bits_per_value.forward bits_per_value.backward loss.train loss.eval_first loss.eval_final "
        "loss.train_eval_final memory.peak_rss_bytes"
    )
    for key in asked.split():
        found = values
        for part in key.split("."):
            found = found[part]
        assert found is not None, key
    line = json.loads((tmp_path / METRICS).read_text().splitlines()[0])
    assert set(line) >= {"step", "loss", "seconds", "compute_s", "encode_s", "decode_s", "wait_s"}
    assert set(line["bytes"]) == set(line["bits"]) == {"forward", "backward"}
