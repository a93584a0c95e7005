"""The page of a report: one file, true numbers, interrupted and invalid runs, hostile names."""

from __future__ import annotations

import dataclasses
import html
import html.parser
import re
from pathlib import Path

import pytest
from reported import page_of, printed
from run_records import write_run

from thinwire.runs.records.finished_runs import Run, slug, unequal
from thinwire.runs.records.run_record import EMULATED, KERNEL
from thinwire.runs.report import plotting
from thinwire.runs.report.page import write_report
from thinwire.uses.kinds import load_runs, show_of
from thinwire.uses.training.run import cards
from thinwire.uses.training.run.summary import cells, headline, summary_rows


class Page(html.parser.HTMLParser):
    """Collects what a page would load, and checks that its tags are closed in order."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag


def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    return page


def test_report_is_one_valid_page_that_loads_nothing(compared: Path):
    runs = load_runs([compared])
    path = write_report(runs, compared / "report.html", show_of(runs))
    text = path.read_text("utf-8")
    page = parsed(text)
    assert page.open == []
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"https?:|@import|<script|//", re.sub(r"<!--.*?-->", "", text))
    assert page.tags.count("svg") == 5
    assert len(page.ids) == len(set(page.ids))
    assert {f"#{i}" for i in page.ids} >= set(page.links)


def test_report_follows_the_theme(compared: Path):
    text = page_of(load_runs([compared]))
    assert "prefers-color-scheme: dark" in text
    assert "#0101" not in text and "#0102" not in text and "#0103" not in text
    used = set(re.findall(r"var\((--\w+)\)", text))
    assert used <= set(re.findall(r"(--\w+):", text))


def test_report_shows_the_table_s_numbers_and_the_notes(compared: Path):
    runs = load_runs([compared])
    runs[1].record.notes.append("mind <the> gap & more")
    runs[2].record.config["seed"] = 7
    text = page_of(runs)
    for row in summary_rows(runs):
        for cell in cells(row)[1:]:
            assert f"<td>{cell}</td>" in text
    assert "step-delta: mind &lt;the&gt; gap &amp; more" in text
    assert "these runs differ in seed (0, 7)" in text
    assert "no TCP dynamics" in text


def test_report_names_the_device_of_each_rank(compared: Path):
    runs = load_runs([compared])
    runs[0].record.environment["devices"] = [{"name": "NVIDIA H100"}, {"name": "cpu"}]
    text = page_of(runs)
    for n, name in enumerate(("NVIDIA H100", "cpu")):
        assert f"<td>devices[{n}].name</td><td>{name}</td>" in text


def test_runs_over_different_links_say_which_had_which(compared: Path):
    runs = load_runs([compared])
    for run in runs:
        run.record.config["emulate"] = run is runs[1]
    runs[1].record.link.emulation = KERNEL
    text = page_of(runs)
    asked, kernel = runs[0].record.link.asked, html.escape(KERNEL)
    assert f"a link of {asked} ({EMULATED}) or a link of {asked} ({kernel})" in text
    assert "these runs differ in emulate (False, True)" in text
    assert "the same data order and seed" not in text
    for run, made in zip(runs, (EMULATED, kernel, EMULATED), strict=True):
        assert f"<td>emulation, {run.label}</td><td>{made}</td>" in text
    assert "no TCP dynamics" in printed(runs) and "kernel" in printed(runs)


def test_runs_that_do_not_compare_get_no_verdict_and_no_ratios(compared: Path):
    runs = load_runs([compared])
    runs[2].record.config |= {"data": "another text", "steps": 4}
    *comparable, other = summary_rows(runs)
    assert all(row.compares and row.fewer and row.faster for row in comparable)
    assert not other.compares and other.fewer is None and other.faster is None
    assert headline(runs).startswith("step-delta sent")
    assert "Ratios are against fp32, where a run compares with it." in page_of(runs)
    said = "2 runs that do not compare: they differ in data, steps."
    two = [runs[0], runs[2]]
    assert headline(two) == said
    text = page_of(two)
    assert f"<h1>{said}</h1>" in text and "these runs differ in data" in text
    assert "fewer bytes" not in text and "faster than" not in text


def test_one_link_written_in_two_ways_is_one(compared: Path):
    runs = load_runs([compared])
    for run, text in zip(runs, ("10mbit,30ms", "30ms, 10mbit", "0.01gbit,30ms"), strict=True):
        run.record.config["link"] = text
    assert headline(runs).startswith("thinwire sent")
    runs[2].record.config["link"] = "10mbit,31ms"
    assert headline(runs).startswith("step-delta sent")


def test_any_option_but_a_few_makes_runs_unequal(compared: Path):
    fp32, other, ours = load_runs([compared])
    values: dict[str, tuple[object, object]] = {
        "lora": (0, 8),
        "lr_schedule": ("constant", "cosine"),
        "dropout": (0.0, 0.1),
        "an option to come": (None, 3),
    }
    for name, (there, here) in values.items():
        fp32.record.config[name], ours.record.config[name] = there, here
    for name in ("out", "port", "eval_every", "resume"):
        fp32.record.config[name], ours.record.config[name] = "here", "there"
    assert set(unequal([fp32.record, ours.record])) == set(values)
    assert headline([fp32, ours]).startswith("2 runs that do not compare: they differ in lora, lr_schedule,")
    assert not unequal([fp32.record, other.record])  # what one of them does not say, as older ones, is free


def test_learning_rates_are_compared_as_they_were(compared: Path):
    fp32, other, ours = (run.record for run in load_runs([compared]))
    fp32.config["lr"], other.config["lr"] = None, 2e-5
    ours.config |= {"lr": None, "lora": 8}
    assert not unequal([fp32, other])
    assert unequal([fp32, ours])["lr"] == ["0.0002", "2e-05"]


def test_report_of_an_interrupted_run_without_metrics(tmp_path: Path):
    write_run(tmp_path, "fp32", status="interrupted")
    (tmp_path / "metrics.jsonl").unlink()
    text = page_of(load_runs([tmp_path]))
    parsed(text)
    assert "did not finish (interrupted)" in text


def interrupted(run: Run, steps: int) -> Run:
    record = run.record
    share = steps / record.totals["steps"]
    part = dataclasses.replace(
        record,
        status="interrupted",
        totals={
            name: round(n * share) if name != "seconds" else n * share for name, n in record.totals.items()
        },
        bytes={name: round(n * share) for name, n in record.bytes.items()},
        loss=dataclasses.replace(record.loss, eval_final=None, train_eval_final=None),
    )
    return dataclasses.replace(run, record=part)


def test_an_interrupted_run_is_no_baseline_of_finished_ones(compared: Path):
    fp32, other, ours = load_runs([compared])
    runs = [interrupted(fp32, 2), other, ours]
    assert [row.baseline for row in summary_rows(runs)] == [False, True, False]
    assert headline(runs) == headline([other, ours])
    text = page_of(runs)
    assert "Ratios are against step-delta." in text and ">smollm2-135m on shakespeare, 21 steps" in text
    assert "fp32 did not finish (interrupted)" in text


def test_an_interrupted_run_is_no_subject_where_a_finished_one_is(compared: Path):
    fp32, other, ours = load_runs([compared])
    for steps in (0, 2):
        assert headline([fp32, other, interrupted(ours, steps)]) == headline([fp32, other])


def test_interrupted_runs_alone_are_measured_by_the_step(compared: Path):
    fp32, _, ours = load_runs([compared])
    whole = summary_rows([fp32, ours])[1]
    assert headline([fp32, interrupted(ours, 2)]) == (
        f"thinwire (interrupted) sent {whole.fewer:.1f}× fewer bytes a step "
        f"({whole.than_bf16:.1f}× fewer than bf16) and was {whole.faster:.1f}× faster than fp32, "
        "with no held-out loss to compare."
    )
    assert headline([interrupted(fp32, 2), ours]).startswith("fp32 (interrupted) sent ")
    assert headline([fp32, interrupted(ours, 0)]).startswith("fp32: 21 steps sent ")
    assert headline([fp32, interrupted(ours, 0)]).endswith("; no other run has figures to show.")
    none = [interrupted(fp32, 0), interrupted(ours, 0)]
    assert headline(none) == "None of these 2 runs has figures to show."
    assert headline(none[:1]) == "fp32 (interrupted) has no figures to show."


def invalid(run: Run) -> Run:
    return dataclasses.replace(run, record=dataclasses.replace(run.record, status="invalid"))


def drawn(text: str, variable: str) -> int:
    """Count the figures in which a colour is used for a curve or a bar."""
    return sum(f"var({variable})" in part for part in re.findall(r"<svg.*?</svg>", text, re.DOTALL))


def test_an_invalid_run_shows_bytes_and_losses_but_no_times(compared: Path):
    fp32, _, ours = load_runs([compared])
    runs = [fp32, invalid(ours)]
    row = summary_rows(runs)[1]
    assert (row.step_seconds, row.faster) == (None, None)
    assert cells(row) == ["thinwire (invalid)", *cells(summary_rows([fp32, ours])[1])[1:5], "–", "–",
                          "3.741 → 3.502", cells(row)[-1]]  # fmt: skip
    assert "fewer than bf16) and cannot be timed against fp32" in headline(runs)
    text = page_of(runs)
    assert "thinwire is no valid measurement, so its times are left out; its notes say why" in text
    assert "did not finish" not in text and ">–</" in text
    # its curves stay where the axis is steps or bytes, and fp32 keeps its colour in all
    assert (drawn(text, "--s1"), drawn(text, "--s0")) == (3, 4)
    assert drawn(page_of([fp32, ours]), "--s1") == 4


def test_against_an_invalid_baseline_nothing_is_timed(compared: Path):
    fp32, _, ours = load_runs([compared])
    base, row = summary_rows([invalid(fp32), ours])
    assert base.baseline and row.faster is None and row.step_seconds
    text = page_of([invalid(fp32), invalid(ours)])
    assert "Loss against time" not in text and "Loss against bytes sent" in text


def test_a_run_has_its_colour_in_figures_that_leave_others_out(compared: Path):
    runs = load_runs([compared])
    auto = dataclasses.replace(runs[1], record=dataclasses.replace(runs[1].record))
    auto.record.recipe = dataclasses.replace(auto.record.recipe, name="auto")
    auto.record.link = dataclasses.replace(auto.record.link, asked="trace:lte")
    other = dataclasses.replace(runs[1], label="bf16", record=dataclasses.replace(runs[1].record))
    text = page_of([runs[0], other, auto])
    assert text.count("<svg") == 8
    waiting = next(f for f in re.findall(r"<svg.*?</svg>", text, re.DOTALL) if 'id="link-waiting' in f)
    assert re.findall(r"var\(--s\d\)", waiting) == ["var(--s3)"]


def test_report_of_long_runs_hostile_names_and_three_stages(tmp_path: Path):
    for i in range(10):
        write_run(tmp_path / str(i), f"x<b>$a_{i}$", steps=90, boundaries=2)
    runs = load_runs([tmp_path])
    text = page_of(runs)
    parsed(text)
    assert "<b>$a" not in text
    assert len(set(plotting.series_order(runs))) == 10


def test_step_parts_add_up_to_the_step(compared: Path):
    for run in load_runs([compared]):
        seconds = sum(m.seconds for m in run.metrics) / len(run.metrics)
        assert sum(cards.step_parts(run)) == pytest.approx(seconds)


def test_slug():
    assert slug("aqsgd:fw=4,bw=8") == "aqsgd-fw4-bw8"
    assert slug("../../etc") == "etc"
    assert slug("...") == "run"
