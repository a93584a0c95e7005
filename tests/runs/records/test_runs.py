"""Loading runs by comparison, folder and file, telling them apart, and what is said of them in words."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
from reported import printed
from run_records import write_run

from thinwire.runs.records.finished_runs import Run, slug, unequal
from thinwire.runs.records.run_record import RecipeText
from thinwire.runs.records.writer import COMPARE
from thinwire.runs.report.page import report_html
from thinwire.types import InputError
from thinwire.uses.kinds import load_runs
from thinwire.uses.training.run import cards
from thinwire.uses.training.run.record import StepMetrics, TrainRecord
from thinwire.uses.training.run.summary import cells, headline, summary_rows


def changed(run: Run, **loss: float) -> Run:
    record = dataclasses.replace(run.record, loss=dataclasses.replace(run.record.loss, **loss))
    return dataclasses.replace(run, record=record)


def test_loading_by_comparison_by_folder_and_by_file(compared: Path):
    assert [r.label for r in load_runs([compared])] == ["fp32", "step-delta", "thinwire"]
    assert load_runs([compared / COMPARE]) == load_runs([compared])
    (compared / COMPARE).unlink()
    assert [r.label for r in load_runs([compared])] == ["fp32", "step-delta", "thinwire"]
    several = load_runs([compared / "thinwire", compared / "fp32" / "run.json"])
    assert [r.label for r in several] == ["thinwire", "fp32"]
    assert len(several[0].metrics) == 21


def test_equal_names_are_told_apart(tmp_path: Path):
    write_run(tmp_path / "a", "fp32")
    write_run(tmp_path / "b", "fp32")
    assert [r.label for r in load_runs([tmp_path / "a", tmp_path / "b"])] == ["fp32 (a)", "fp32 (b)"]


def test_equal_runs_of_two_comparisons_are_told_apart(tmp_path: Path):
    for folder in ("a/x/fp32", "b/x/fp32", "b/y/fp32"):
        write_run(tmp_path / folder, "fp32", steps=1)
    folders = [tmp_path / part for part in ("a/x", "b/x", "b/y")]
    labels = ["fp32 (a/x/fp32)", "fp32 (b/x/fp32)", "fp32 (y/fp32)"]
    assert [r.label for r in load_runs(folders)] == labels
    assert [r.label for r in load_runs([folders[0], folders[0]])] == ["fp32 (fp32)"] * 2  # one run, twice


def test_a_run_and_a_comparison_in_one_folder_are_told_apart(compared: Path, tmp_path: Path):
    out = tmp_path / "both"
    shutil.copytree(compared, out)
    write_run(out, "bf16", steps=1)
    assert [r.label for r in load_runs([out / COMPARE])] == ["fp32", "step-delta", "thinwire"]
    assert [r.label for r in load_runs([out / "run.json"])] == ["bf16"]
    with pytest.raises(InputError, match=r"both a run and a comparison; give .*run\.json or .*compare\.json"):
        load_runs([out])


def test_runs_of_unlike_machines_do_not_compare(compared: Path):
    fp32, other, ours = (run.record for run in load_runs([compared]))
    other.environment = fp32.environment | {
        "dtype": "bf16",
        "threads": 2,
        "machine": {"cpu": "another processor"},
        "devices": [{"name": "NVIDIA H100"}],
    }
    ours.config["dtype"], fp32.config["dtype"] = "fp32", "auto"  # of which auto made the same
    assert set(unequal([fp32, other])) == {"dtype", "threads", "processor", "device"}
    assert not unequal([fp32, ours])
    ours.environment = other.environment | {"devices": [{"name": "NVIDIA A100"}]}
    assert unequal([other, ours])["device"] == ["NVIDIA A100", "NVIDIA H100"]
    ours.environment = {}  # older records say nothing
    assert not unequal([fp32, ours])


def test_our_recipe_is_known_by_its_name_whatever_the_label(tmp_path: Path):
    for name in ("fp32", "thinwire:keep=a", "bf16"):
        for folder in ("a", "b"):
            write_run(tmp_path / folder / slug(name), name, (4.0, 4.0), steps=1)
    runs = load_runs([tmp_path / "a", tmp_path / "b"])
    assert headline(runs).startswith("thinwire:keep=a (a/thinwire-keepa) sent ")


def test_a_name_with_brackets_is_printed_as_it_is(tmp_path: Path):
    for folder in ("[", "a[/x]"):
        write_run(tmp_path / folder, "fp32", steps=1)
    runs = load_runs([tmp_path / "[", tmp_path / "a[/x]"])
    runs[0].record.link.asked = "trace:a[/b]"
    text = printed(runs).replace("\n", "")
    assert "fp32 ([)" in text and "x])" in text and "trace:a[/b]" in text


def test_nothing_to_load(tmp_path: Path):
    with pytest.raises(InputError, match="holds no run"):
        load_runs([tmp_path])
    (tmp_path / COMPARE).write_text("[]")
    with pytest.raises(InputError, match="no list of run records"):
        load_runs([tmp_path])
    with pytest.raises(InputError, match="no runs to report"):
        report_html([], cards)


def test_the_numbers_of_a_row(compared: Path):
    runs = load_runs([compared])
    base, _, ours = summary_rows(runs)
    b, o = runs[0].record, runs[2].record
    assert base.baseline and base.fewer == base.faster == 1.0
    assert ours.sent == o.bytes["forward"] + o.bytes["backward"] + o.bytes["control"]
    assert ours.fewer == pytest.approx(base.sent / ours.sent)
    assert ours.faster == pytest.approx(b.totals["seconds"] / o.totals["seconds"])
    values = (b.bytes["raw_forward"] + b.bytes["raw_backward"]) / 4
    assert ours.than_bf16 == pytest.approx(2 * values / ours.sent) and ours.first_pass is None
    assert cells(ours)[4] == "3.0 + 2.5 = 5.5"


def test_headline_says_what_the_numbers_say(compared: Path):
    runs = load_runs([compared])
    ours = summary_rows(runs)[2]
    assert headline(runs) == (
        f"thinwire sent {ours.fewer:.1f}× fewer bytes (5.8× fewer than bf16) and was "
        f"{ours.faster:.1f}× faster than fp32, at the same held-out loss (+0.1%)."
    )


def test_a_first_pass_has_a_ratio_of_its_own() -> None:
    """Three passes of two steps over 1,000 values; the first one's are sent in 8 bits, the others' in 2."""
    record = TrainRecord(recipe=RecipeText("x"), config={"steps": 6, "epochs": 3})
    for step in range(1, 7):
        bits = 8.0 if step <= 2 else 2.0
        sent = {"forward": int(1000 * bits / 8), "backward": int(1000 * bits / 8)}
        parts = dict.fromkeys(("compute_s", "encode_s", "decode_s", "wait_s"), 0.0)
        said = {"seconds": 1.0, "bytes": sent, "bits": dict.fromkeys(sent, bits), "loss": 1.0}
        record.count(StepMetrics(step=step, **said, **parts))
        if step >= 2:
            assert record.times_bf16()[1] == pytest.approx(2.0)
    assert record.times_bf16()[0] == pytest.approx(4.0)
    assert TrainRecord(recipe=RecipeText("x")).times_bf16() == (None, None)


def test_headline_is_honest_when_worse(compared: Path):
    fp32, _, ours = load_runs([compared])
    assert "at a 8.6% higher held-out loss" in headline([fp32, changed(ours, eval_final=3.8)])
    assert "at a 14.3% lower held-out loss" in headline([fp32, changed(ours, eval_final=3.0)])
    slow = dataclasses.replace(ours.record, totals=fp32.record.totals | {"seconds": 1e4})
    assert "slower than fp32" in headline([fp32, dataclasses.replace(ours, record=slow)])
    more = dataclasses.replace(ours.record, bytes=ours.record.bytes | {"control": 10**9})
    assert re.search(r"sent \d+\.\d+× the bytes", headline([fp32, dataclasses.replace(ours, record=more)]))


def test_headline_of_one_run_and_of_a_run_without_evaluation(compared: Path):
    fp32, _, ours = load_runs([compared])
    assert headline([ours]).startswith("thinwire: 21 steps sent 4.") and "5.5 bits a value" in headline(
        [ours]
    )
    assert "no held-out loss" in headline([fp32, changed(ours, eval_final=None)])


def test_terminal_table_fits_a_terminal(compared: Path):
    text = printed(load_runs([compared]))
    assert "step-delta" in text and "3.741 → 3.502" in text
    assert "…" not in text and len(text.splitlines()) == 6
    assert "no TCP dynamics" in text.splitlines()[-1]
