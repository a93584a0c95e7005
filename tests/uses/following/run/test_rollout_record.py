"""The record of rollouts: complete and readable at every moment, its sums right, and drawn."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.runs.records.finished_runs import Run
from thinwire.runs.report.page import report_html
from thinwire.types import InputError
from thinwire.uses.following.hosts.rollout_batch import RolloutAge, RolloutBatch
from thinwire.uses.following.hosts.rollout_pool import RolloutPool
from thinwire.uses.following.run import rollout_cards
from thinwire.uses.following.run.rollout_record import RolloutsRecord
from thinwire.uses.following.run.rollout_recorder import RolloutRecorder
from thinwire.uses.kinds import load_runs

SET = {"host": "127.0.0.1", "port": 7201, "max_age": 2, "timeout": 60.0}
NAMES = [f"{i:04x} (192.0.2.{i})" for i in range(9)]
SECONDS = st.sampled_from([0.0, 0.25, 3.5])
PARTS = st.tuples(st.sampled_from(NAMES), st.integers(0, 2), SECONDS, SECONDS, st.integers(1, 9))
BATCHES = st.lists(st.lists(PARTS, min_size=1, max_size=4), max_size=5)


def batch(number: int, parts: list[tuple[str, int, float, float, int]], began: float) -> RolloutBatch:
    newest = number + 2
    ages = tuple(
        RolloutAge(number, who, newest - behind, behind, age, waited, many, 3 * many, waited + 1.0)
        for who, behind, age, waited, many in parts
    )
    return RolloutBatch(number, number - 1, newest, began, 4.0, ages, 100, 200)


def read(folder: Path) -> Run[RolloutsRecord]:
    (run,) = load_runs([folder])
    assert {file.name for file in folder.iterdir()} <= {"run.json", "metrics.jsonl", "run.lock"}
    return run


@settings(max_examples=8)
@given(BATCHES)
def test_sums_are_those_of_the_parts_at_every_moment(
    batches: list[list[tuple[str, int, float, float, int]]],
) -> None:
    with TemporaryDirectory() as name:
        folder, recorder = Path(name), RolloutRecorder(name)
        recorder.begin(SET)
        assert read(folder).record.status == "running"
        for who in NAMES:
            recorder.came(who)
        recorder.went(NAMES[8], 4)
        for number, parts in enumerate(batches, 1):
            recorder.made(batch(number, parts, recorder._began + 5.0 * number))
            recorder.note("mind <this>")
            assert read(folder).record.totals["batches"] == number
        recorder.end(KeyboardInterrupt())
        run = read(folder)
        record, parts = run.record, [part for each in batches for part in each]
        assert (record.status, record.config["max_age"]) == ("interrupted", 2)
        assert len(run.metrics) == len(batches) and record.notes == ["mind <this>"] * bool(batches)
        if batches:
            totals = {"seconds": 4.0 * len(batches), "elapsed": 5.0 * len(batches) - 1.0}
            many = sum(part[4] for part in parts)
            totals |= {"samples": many, "tokens": 3 * many, "waited": sum(part[3] for part in parts)}
            assert {key: record.totals[key] for key in totals} == pytest.approx(totals)
            assert record.bytes == {"prompts": 100 * len(batches), "samples": 200 * len(batches)}
        for worker in record.workers:
            own = [part for part in parts if part[0] == worker.name]
            assert (worker.parts, worker.samples) == (len(own), sum(part[4] for part in own))
            assert worker.waits == sum(part[3] > 0 for part in own)
            assert worker.behind == max((part[1] for part in own), default=0)
        assert [worker.lost for worker in record.workers] == [0] * 8 + [4]
        assert rollout_cards.headline([run]).startswith(f"{len(batches)} batch" if batches else "no batch")


def test_two_runs_are_drawn_beside_each_other_and_what_is_beyond_the_bound_is_told(tmp_path: Path) -> None:
    runs = []
    for name, behind in (("a", 1), ("b", 3)):
        recorder = RolloutRecorder(tmp_path / name)
        recorder.begin(SET)
        recorder.note("mind <this>")
        recorder.made(batch(1, [(NAMES[0], behind, 0.5, 0.0, 2)], 0.0))
        recorder.end(None)
        run = read(tmp_path / name)
        many = 401 if name == "a" else 2  # more than there are marks
        runs.append(Run(name, run.record, [replace(run.metrics[0], batch=i + 1) for i in range(many)]))
    page = report_html(runs, rollout_cards)
    assert page.count("<svg") == 6 and page.count("The oldest of each 3 batches") == 2
    assert "mind &lt;this&gt;" in page and page.count("max_age=2; above it") == 2
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    told = "b has parts that were made with weights beyond max_age: please report it"
    assert rollout_cards.warnings(runs) == [told]


def test_what_is_wrong_in_a_record_is_refused_by_name(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path)
    with pytest.raises(InputError, match="this recorder has no pool yet"):
        recorder.note("nobody asked")
    recorder.begin(SET)
    with pytest.raises(InputError, match="make a recorder for each"):
        recorder.begin(SET)
    with pytest.raises(InputError, match="is in use by process"):
        RolloutPool(record=RolloutRecorder(tmp_path))
    recorder.came(NAMES[0])
    recorder.made(batch(1, [(NAMES[0], 1, 0.5, 0.0, 2)], 0.0))
    recorder.end(None)
    good = json.loads((tmp_path / "run.json").read_text())
    good["workers"][0]["waits"] = "often"
    (tmp_path / "run.json").write_text(json.dumps(good))
    with pytest.raises(InputError, match=r"'workers\[0\].waits' is 'often', not of type int"):
        load_runs([tmp_path])
    good["workers"] = []
    (tmp_path / "run.json").write_text(json.dumps(good))
    line = (tmp_path / "metrics.jsonl").read_text().replace('"behind": 1', '"behind": 1.5')
    (tmp_path / "metrics.jsonl").write_text(line)
    with pytest.raises(InputError, match=r"'parts\[0\].behind' is '1.5', not of type int"):
        load_runs([tmp_path])
    for wrong in ({"max_age": -1}, {"max_age": "1"}, {"port": 70000}, {"ages": 1}):
        with pytest.raises(InputError):
            RolloutRecorder(tmp_path / "new").begin(SET | wrong)
    assert not (tmp_path / "new").exists()
