"""The figures of the docs, drawn from committed results as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import matplotlib

from bench.study.cells import RESULTS, Kept
from thinwire.runs.records.finished_runs import Run
from thinwire.runs.records.writer import read_json
from thinwire.runs.report.plotting import smooth
from thinwire.uses.kinds import read_record
from thinwire.uses.training.run import replica_cards

matplotlib.use("svg")
import matplotlib.pyplot as plt

AGES = (  # cells of ``following.costs``: at the pace of training, and ten times what the link carries
    ("age", "10mbit", "1e-06", "stride-1", "trained", "bbr"),
    ("age", "10mbit", "1e-05", "stride-1", "trained", "bbr"),
    ("age", "10mbit", "5e-05", "stride-1", "10x", "cubic"),
)
SOONER = ("reached.json", "followed.json", "federated.json", "links.json", "pictures.json")
COLOURS = ("#6b7280", "#d97706", "#2563eb", "#059669", "#7c3aed", "#db2777", "#0891b2", "#65a30d",
           "#7f1d1d", "#1e3a8a", "#111827")  # fmt: skip


def draw_all(folder: Path) -> None:
    """Draw every figure whose results are there."""
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams.update(
        {"svg.hashsalt": "thinwire", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    figures = (
        ("student", draw_student, ("cells/student.json", "deltas.json")),
        ("quality", draw_quality, ("quality.json",)),
        ("auto", draw_auto, ("cells/links.json",)),
        ("state-age", draw_ages, ("cells/state.json",)),
        ("sooner", draw_sooner, SOONER),
    )
    for name, draw, source in figures:
        if all((RESULTS / part).exists() for part in source):
            figure = draw()
            figure.tight_layout()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
            plt.close(figure)


def _json(name: str) -> Any:
    return read_json(RESULTS / name)


def _logarithmic(axes: Any, way: str, *ticks: float) -> None:
    """Let an axis be logarithmic, with these ticks alone, as plain numbers."""
    getattr(axes, f"set_{way}scale")("log")
    getattr(axes, f"set_{way}ticks")(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()


def draw_sooner() -> Any:
    """How many times sooner the same result was there than by what people use, a bar for each use."""
    rows = sorted(_sooner(), key=lambda row: row[-1])
    figure, axes = plt.subplots(figsize=(8.6, 2.9))
    names = [f"{use}\n{link}" for use, link, *_ in rows]
    axes.barh(names, [times - 1 for *_, times in rows], left=1, color=COLOURS[2], height=0.6)
    for i, (_, _, against, times) in enumerate(rows):
        told = f"{times:.0f}×" if times >= 100 else f"{times:.1f}×"
        axes.text(times * 1.06, i, f"{told} sooner than {against}", va="center", fontsize=9)
    _logarithmic(axes, "x", 1, 3, 10, 30, 100)
    axes.set(xlim=(1, 4000), xlabel="times sooner (logarithmic)")
    axes.tick_params(axis="y", labelsize=9, length=0)
    return figure


def _sooner() -> Iterator[tuple[str, str, str, float]]:
    """Yield use, link, whom it is compared with, and how many times sooner the same was there."""
    runs = _json("reached.json")
    base, *_, auto = runs
    target = base["loss"]["eval_final"]
    found = (Run("", read_record(r, "reached.json")) for r in (base, auto))
    first, ours = (replica_cards.reached(run, target) for run in found)  # type: ignore[arg-type]
    if first is not None and ours is not None:
        yield "replicas to one loss", "40 Mbit/s, 50 ms", "all-reduce", first.seconds / ours.seconds
    record = _json("followed.json")["record"]
    whole = record["nbytes"] / record["link"]["rate_bytes_s"]
    ages = sorted(a["age"] for log in record["followers"].values() for a in log["arrivals"])
    told = "10 Mbit/s, 30 ms", "whole in bf16 [derived]"
    yield "a followed model's version", *told, whole / ages[len(ages) // 2]
    ten = [r for r in _json("federated.json")["rows"] if r["group"] == "ten"]
    by = {r["method"]: r["until"]["virtual_s"][0] for r in ten}
    yield "ten clients to 78 %", "6 to 60 kbit/s up", "FedBuff", by["fedbuff"] / by["thinwire"]
    trace = [r for r in _json("links.json")["rows"] if (r["model"], r["link"]) == ("gpt2-lab", "trace")]
    kept = {r["recipe"]: r.get("share_in_rounds") or r["share"] for r in trace}
    place = "LTE trace, 2 to 60 Mbit/s", "bf16"
    yield "steps of a model in two stages", *place, kept["thinwire"] / kept["bf16"]
    seconds = {r["recipe"]["name"]: r["totals"]["seconds"] for r in _json("pictures.json")}
    yield "a sheet of pictures", "100 Mbit/s, 5 ms", "float16 exchange", seconds["fp16"] / seconds["compact"]


def draw_student() -> Any:
    """Loss against steps and against bytes, and the energy of each delta."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.4))
    runs = [r for r in Kept("student").all().values() if "loss" in r]
    for colour, r in zip(cycle(COLOURS), runs, strict=False):
        loss = smooth(r["loss"]["train"], 10)
        steps = len(loss)
        sent = (r["bytes"]["forward"] + r["bytes"]["backward"]) / steps / 1e6
        left.plot(range(1, steps + 1), loss, color=colour, lw=1, label=r["recipe"]["name"])
        middle.plot([sent * (i + 1) for i in range(steps)], loss, color=colour, lw=1)
    left.set(xlabel="step", ylabel="training loss, mean of 10 steps")
    left.legend(frameon=False)
    middle.set(xlabel="sent, MB", xscale="log")
    rows = [r for r in _json("deltas.json")["rows"] if r["of"] == "activations"]
    right.barh([r["memory"] for r in rows][::-1], [r["energy"] for r in rows][::-1], color="#2563eb")
    right.set(xlabel="energy left to send (SmolLM2-135M, last epoch)")
    return figure


def draw_quality() -> Any:
    """Held-out loss against bits a value, every recipe at its best learning rate, three seeds."""
    found = _json("quality.json")
    figure, axes = plt.subplots(figsize=(7, 4))
    for colour, r in zip(cycle(COLOURS), found["recipes"], strict=False):
        losses, own = r["eval_final_by_seed"], {"color": colour, "label": r["recipe"]}
        axes.scatter([r["bits"]] * len(losses), losses, color=colour, s=14)
        axes.scatter([r["bits"]], [sum(losses) / len(losses)], s=60, marker="_", **own)
    axes.set(xlabel="bits a value, forward + backward", ylabel="held-out loss, nats a token")
    _logarithmic(axes, "x", 5, 10, 20, 30, 64)
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_auto() -> Any:
    """What ``auto`` saw and did while a link fell from 500 to 20 Mbit/s and rose again."""
    steps = Kept("links").get("whole", "gpt2-lab", "drop", "auto")["steps"]
    times = list(accumulate(s["seconds"] for s in steps))
    figure, (rate, bits, waiting) = plt.subplots(3, 1, figsize=(8, 6), sharex=True)
    for style, (source, way) in zip(("-", "--"), ((0, "forward"), (1, "backward")), strict=True):
        links = [next(k for k in s["links"] if k["source"] == source) for s in steps]
        known = [(t, k["rate_bytes_s"]) for t, k in zip(times, links, strict=True) if k["rate_bytes_s"]]
        own = {"where": "pre", "ls": style, "label": way}
        rate.step([t for t, _ in known], [x / 125e3 for _, x in known], color=COLOURS[2], **own)
        bits.step(times, [s["bits"][way] for s in steps], color=COLOURS[1], **own)
    waiting.step(times, [s["wait_s"] / s["seconds"] for s in steps], where="pre", color=COLOURS[0])
    rate.set(ylabel="rate as estimated,\nMbit/s")
    bits.set(ylabel="bits a value")
    _logarithmic(rate, "y", 20, 50, 100, 200, 500)
    _logarithmic(bits, "y", 1, 2, 4, 8, 16, 32)
    waiting.set(ylabel="share of the step\nspent waiting", xlabel="seconds of training")
    rate.legend(frameon=False)
    return figure


def draw_ages() -> Any:
    """Age of what a follower holds against time: it grows until the next version is there."""
    figure, all_axes = plt.subplots(1, len(AGES), figsize=(12, 3.2))
    for axes, source in zip(all_axes, AGES, strict=True):
        found = Kept("state").get(source)
        rows = found["rows"]
        began = rows[0]["at"]
        times, ages = [], []
        for row, until in zip(rows, [r["at"] for r in rows[1:]], strict=False):
            times += [row["at"] - began, until - began]
            ages += [row["age"], row["age"] + until - row["at"]]
        axes.plot(times, ages, color=COLOURS[2], lw=1)
        axes.set(xlabel="s", ylim=(0, None))
        every = found["summary"]["published_every"]
        axes.set_title(f"{found['rate']:g}, every {every:.2g} s, {found['control']}", fontsize=10)
    all_axes[0].set(ylabel="age of the version held, s")
    return figure
