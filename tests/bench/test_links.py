"""The studies of links and of the emulator: what counts as a result, and where a figure comes from."""

from __future__ import annotations

from typing import Any

import pytest
from bench.links import AUTO, FIXED
from bench.links_worker import LIFTED

from bench import bounds, emulator, links_summary, pages, pages_links, rounds, rounds_summary

MODEL, LINK = "gpt2-lab", "10+30"
STEPS = 90
FREE = 0.2  # seconds of a step without a shape


def run(seconds: float, nbytes: int, loss: float = 6.0) -> dict[str, Any]:
    """Return the cell of a whole run: its steps, and what is read of its record."""
    record = {
        "started": "2026-11-21T12:00:00+00:00",
        "loss": {"eval_final": loss},
        "totals": {"tokens": STEPS * 8 * 128},
        "decisions": [],
        "status": "done",
    }
    step = {"seconds": seconds, "bytes": {"forward": nbytes, "backward": nbytes}}
    return {"record": record, "steps": [step] * STEPS}


def session(nbytes: int) -> dict[str, Any]:
    """Return a timing session: first visits of two seconds, revisits of one, C of a fifth."""
    visits = [
        {"recipe": r, "visit": v, "seconds": 1.0 if v else 2.0, "bytes": nbytes, "wire_bytes": nbytes}
        for r in FIXED
        for v in (0, 1, 2)
    ]
    free = {"recipe": LIFTED, "visit": 0, "seconds": FREE, "bytes": 1, "wire_bytes": 1}
    return {"steps": [*visits, free], "network": {"congestion": {}, "lateness": {}}}


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], Any]:
    """Cells of one model and link, which stand in for the committed ones."""
    found: dict[tuple[str, ...], Any] = {
        ("timing", MODEL, LINK): session(nbytes=10),
        ("whole", MODEL, "unlimited", "fp32"): run(FREE, 1000),
        ("whole", MODEL, LINK, AUTO): run(0.4, 50),
        **{("training", MODEL, "none", recipe): run(FREE, 70) for recipe in FIXED},
    }
    monkeypatch.setattr(rounds, "rounds", lambda study, way: {})
    monkeypatch.setattr(links_summary, "free_runs", lambda model: [run(FREE, 1000)] if model == MODEL else [])
    monkeypatch.setattr(links_summary, "read", lambda *cell: found.get(tuple(filter(None, cell))))
    return found


def row(recipe: str) -> dict[str, Any]:
    (only,) = [r for r in links_summary.matrix() if (r["link"], r["recipe"]) == (LINK, recipe)]
    return only


def test_a_product_has_the_bytes_of_the_whole_run(cells: dict[tuple[str, ...], Any]) -> None:
    found = row("thinwire")
    assert found["how"] == "product" and found["bytes"] == STEPS * 2 * 70
    assert found["seconds"] == pytest.approx(30 * 2.0 + 60 * 1.0)
    line = bounds.line_seconds(LINK, 2 * 70)
    assert found["communication_to_compute"] == pytest.approx((line or 0) / FREE)


def test_without_its_training_a_product_is_no_cell(cells: dict[tuple[str, ...], Any]) -> None:
    del cells["training", MODEL, "none", "thinwire"]
    assert "thinwire" not in {r["recipe"] for r in links_summary.matrix()}


def goal() -> dict[str, Any]:
    (only,) = [g for g in links_summary.goals(links_summary.matrix()) if g["link"] == LINK]
    return only


def test_goals_are_held_against_end_to_end_runs_where_there_are_some(
    cells: dict[tuple[str, ...], Any],
) -> None:
    before = goal()["faster_than"]
    assert before["aqsgd:fw=4,bw=8"]["one_epoch"] == pytest.approx(2.0 / 0.4)
    assert before["aqsgd:fw=4,bw=8"] == before["tahquant"]
    cells["whole", MODEL, LINK, "aqsgd:fw=4,bw=8"] = run(0.5, 70)
    cells["whole", MODEL, LINK, "fp32"] = run(1.6, 1000)
    after = goal()
    assert after["faster_than"]["tahquant"] == before["tahquant"]
    assert after["faster_than"]["aqsgd:fw=4,bw=8"]["one_epoch"] == pytest.approx(0.5 / 0.4)
    assert after["faster_than"]["aqsgd:fw=4,bw=8"]["epochs"] == pytest.approx(0.5 / 0.4)
    assert after["fp32_keeps"] == pytest.approx(FREE / 1.6)
    (checked,) = [v for v in links_summary.verified(links_summary.matrix()) if v["recipe"] == "fp32"]
    assert checked["whole"] == pytest.approx(FREE / 1.6)


def verdicts() -> dict[str, Any]:
    found = links_summary.verdicts(links_summary.goals(links_summary.matrix()))
    return {v["goal"]: v["met"] for v in found}


def test_a_missed_goal_is_said_to_be_missed(cells: dict[tuple[str, ...], Any]) -> None:
    cells["whole", MODEL, LINK, "fp32"] = run(1.6, 1000)
    cells["whole", MODEL, LINK, AUTO]["steps"][0] = {**run(4.0, 50)["steps"][0]}
    found = verdicts()
    assert (
        found["share of the bound, first pass"] is False and found["share of the bound, first step"] is False
    )
    assert found["sooner than AQ-SGD `aqsgd:fw=3,bw=6`, one pass"] is True
    cells["training", MODEL, "none", "tahquant"] = run(FREE, 70, loss=7.0)
    assert verdicts()["sooner than TAH-Quant `tahquant`, to the loss"] is False  # nothing to compare with


def test_a_lead_within_the_noise_is_no_lead(cells: dict[tuple[str, ...], Any]) -> None:
    for recipe in FIXED:
        cells["whole", MODEL, "trace", recipe] = run(0.5, 70)
    text = "sooner than every fixed recipe, the quickest of them `"
    for seconds, met in ((0.4, True), (0.495, None), (0.505, False)):
        cells["whole", MODEL, "trace", AUTO] = run(seconds, 50)
        assert [m for goal, m in verdicts().items() if goal.startswith(text)] == [met]


def one_of_a_round(seconds: float, loss: float = 6.0) -> dict[str, Any]:
    """Return a run as ``bench.rounds`` keeps it, whose first step takes twice as long as the others."""
    return {"seconds": [2 * seconds] + [seconds] * (STEPS - 1), "bytes": [100] * STEPS, "eval_final": loss}


def test_runs_made_in_rounds_count_by_the_median_of_their_rounds(
    cells: dict[tuple[str, ...], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    took = dict.fromkeys(rounds.SLOW.recipes, (0.9, 1.2, 1.5))
    took |= {AUTO: (0.3, 0.4, 0.5), "tahquant": (0.36, 0.4, 0.75), "fp32": (FREE,) * 3}  # 1.2, 1.0, 1.5 times
    losses = {AUTO: 6.0}
    monkeypatch.setattr(
        rounds,
        "rounds",
        lambda study, way: {
            number: one_of_a_round(s, losses.get(way[1], 6.0))
            for number, s in enumerate(took.get(way[1], ()))
            if way[2] == "cubic" and study is rounds.SLOW
        },
    )
    found = goal()
    assert found["faster_than"]["tahquant"]["epochs"] == pytest.approx(1.2)
    assert found["faster_than"]["thinwire"]["one_epoch"] == pytest.approx(3.0)
    assert set(found["faster_than"]) == set(rounds.SLOW.recipes) - {AUTO} and found["rounds"] == 3
    assert found["share_first"] == pytest.approx(FREE / 0.4)
    assert found["share_step_one"] == pytest.approx(FREE / 0.8)
    assert found["bound"] == pytest.approx(bounds.bound(LINK, FREE, 100, 4))
    drawn = pages_links.in_rounds("slow")({"rounds": rounds_summary.all_rows()}, pages.table)
    assert "| 1.20× |" in drawn
    kept = row("tahquant")
    assert kept["share_in_rounds"] == pytest.approx(FREE * STEPS / (0.4 * (STEPS + 1)))
    drawn = pages_links.matrix(MODEL)({"rows": [kept | {"share": 0.5}], "links": [LINK]}, pages.table)
    assert f"| `tahquant` | {pages_links.percent(kept['share_in_rounds'])} |" in drawn
    losses[AUTO] = 7.0  # auto does not reach the loss: being done sooner says nothing
    assert goal()["faster_than"]["tahquant"]["epochs"] is None and goal()["same_loss"] is False
    del took["thinwire"]  # a rival that is missing might be the quickest: then single runs count
    assert "rounds" not in goal()


def test_recipes_far_behind_count_by_a_study_of_their_own(
    cells: dict[tuple[str, ...], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And within its rounds: machines differ from study to study."""
    took = {rounds.ELSEWHERE.name: (0.4, 0.5), rounds.BEHIND.name: (0.8, 2.0)}  # auto, and each of the others

    def made(study: rounds.Study, way: rounds.Way) -> dict[int, Any]:
        if study.name not in took:
            return {}
        own, others = took[study.name]
        return {1: one_of_a_round(own if way[1] == AUTO else FREE if way == rounds.FREE else others)}

    monkeypatch.setattr(rounds, "rounds", made)
    found = {goal["link"]: goal for goal in rounds_summary.elsewhere_goals()}
    sooner = {name: v["epochs"] for name, v in found["satellite"]["faster_than"].items()}
    assert sooner["thinwire"] == pytest.approx(1.25) and sooner["fp32"] == pytest.approx(2.5)
    said = {v["link"]: v["goal"] for v in links_summary.verdicts([*found.values()])}
    assert said["satellite"].startswith("sooner than every fixed recipe, the quickest of them `")
    assert said["home-uplink"].startswith("sooner than all others in the rounds")
    assert len({rounds.cell_file(*cell) for cell in rounds.cells()}) == len([*rounds.cells()])
    assert [n for study, n, _ in rounds.cells() if study is rounds.BEHIND] == [1] * 6


def test_a_job_with_many_micro_batches_is_held_against_its_own_bound(
    cells: dict[tuple[str, ...], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And against all goals, by an fp32 of its own, of which a few steps tell the speed."""
    took = dict.fromkeys(rounds.DEEP.recipes, 1.0) | {AUTO: 0.21, "fp32": 2.0}
    steps = rounds.DEEP.steps

    def made(study: rounds.Study, way: rounds.Way) -> dict[int, Any]:
        seconds = FREE if way == rounds.FREE else took.get(way[1], 1.0)
        run = {"seconds": [seconds] * steps, "bytes": [1000] * steps, "eval_final": 5.0}
        if way[1] == "fp32" and way != rounds.FREE:
            run |= {"seconds": [seconds] * 6, "bytes": [1000] * 6, "eval_final": 9.0}
        return {1: run} if study is rounds.DEEP else {}

    monkeypatch.setattr(rounds, "rounds", made)
    deep = links_summary.goals(links_summary.matrix())[-1]
    assert (deep["model"], deep["link"]) == (f"{MODEL}, 32 micro-batches", "8+5")
    assert deep["fp32_keeps"] == pytest.approx(FREE / 2.0)
    assert deep["bound"] == pytest.approx(bounds.bound("8+5", FREE, 1000, 32))
    met = {v["goal"]: v["met"] for v in links_summary.verdicts([deep])}
    assert (
        met["share of the free step, first step"] is True and len(met) == 3 + 3 * (deep["bound"] >= 0.95) + 5
    )
    (brief,) = [r for r in rounds_summary.all_rows() if r["recipe"] == "fp32" and r["link"] == "8+5"]
    assert brief["epochs"] == [pytest.approx(2.0 * steps)] and brief["bytes"] == 1000 * steps
    assert brief["eval_final"] is None
    took[AUTO] = 0.23  # 87 % of the free step
    met = {v["goal"]: v["met"] for v in links_summary.verdicts(rounds_summary.deep_goals())}
    assert met["share of the free step"] is False and met["share of the bound"] is False


# The emulator's study.


def emulated(valid: bool, rate: float = 1.2e6) -> dict[str, Any]:
    """Return what one attempt at a cell of 10 Mbit/s and 5 ms brings, not yet judged."""
    about = {"scheduling": "fifo", "lateness": {"mean": 1e-4}, "lateness_limit": 1e-3, "cpu_share": 0.1}
    found = {"trip": 0.0101, "rate": rate, "mean_rate": rate, "seconds": [rate], "congestion": "cubic"}
    return found | about | {"load": {}, "valid": valid, "attempt": 1}


def test_a_late_cell_has_no_rate() -> None:
    late = emulator.judged(emulated(valid=False), 10, 5, "cubic")
    assert late["within"] is False and late["valid"] is False
    assert not {"rate", "rate_off", "mean_rate", "seconds", "trip"} & set(late)
    assert "INVALID" in emulator.line("a cell", late) and "Mbit/s" not in emulator.line("a cell", late)
    good = emulator.judged(emulated(valid=True), 10, 5, "cubic")
    assert good["within"] and "within" in emulator.line("a cell", good)


@pytest.mark.parametrize(("valid", "earlier"), [(True, [1.0, 9e5]), (False, [1.0])])
def test_a_late_cell_s_rate_is_not_carried_on(
    monkeypatch: pytest.MonkeyPatch, valid: bool, earlier: list[float]
) -> None:
    monkeypatch.setattr(emulator, "cell", lambda *_: {"within": True, "valid": True})
    before = {"within": False, "valid": valid, "rate": 9e5, "earlier": [1.0]}
    assert emulator.improved(before, 10, 5, "cubic")["earlier"] == earlier
    assert emulator.improved(None, 10, 5, "cubic")["earlier"] == []
