"""The figures of the docs, drawn from committed results as SVG."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import matplotlib

from bench.study.cells import RESULTS, Kept
from thinwire.runs.records.runs import Run
from thinwire.runs.report.drawing import smooth
from thinwire.uses.kinds import read_record
from thinwire.uses.training.run.record import reaching

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
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
            plt.close(figure)


def _json(name: str) -> Any:
    return json.loads((RESULTS / name).read_text("utf-8"))


def draw_sooner() -> Any:
    """How many times sooner the same result was there than by what people use, a bar for each use."""
    rows = sorted(_sooner(), key=lambda row: row[-1])
    figure, axes = plt.subplots(figsize=(8.6, 2.9))
    names = [f"{use}\n{link}" for use, link, *_ in rows]
    axes.barh(names, [times - 1 for *_, times in rows], left=1, color=COLOURS[2], height=0.6)
    for i, (_, _, against, times) in enumerate(rows):
        told = f"{times:.0f}×" if times >= 100 else f"{times:.1f}×"
        axes.text(times * 1.06, i, f"{told} sooner than {against}", va="center", fontsize=9)
    axes.set(xscale="log", xlim=(1, 4000), xlabel="times sooner (logarithmic)")
    axes.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
    axes.minorticks_off()
    axes.tick_params(axis="y", labelsize=9, length=0)
    figure.tight_layout()
    return figure


def _sooner() -> Iterator[tuple[str, str, str, float]]:
    """Yield use, link, whom it is compared with, and how many times sooner the same was there."""
    runs = _json("reached.json")
    base, *_, auto = runs
    target = base["loss"]["eval_final"]
    first, ours = (reaching.reached(Run("", read_record(r, "reached.json")), target) for r in (base, auto))  # type: ignore[arg-type]
    if first is not None and ours is not None:
        yield "replicas to one loss", "40 Mbit/s, 50 ms", "all-reduce", first.seconds / ours.seconds
    record = _json("followed.json")["record"]
    whole = record["nbytes"] / record["link"]["rate_bytes_s"]
    ages = sorted(a["age"] for log in record["followers"].values() for a in log["arrivals"])
    yield (
        "a followed model's version",
        "10 Mbit/s, 30 ms",
        "whole in bf16 [derived]",
        whole / ages[len(ages) // 2],
    )
    by = {
        r["method"]: r["until"]["virtual_s"][0]
        for r in _json("federated.json")["rows"]
        if r["group"] == "ten"
    }
    yield "ten clients to 78 %", "6 to 60 kbit/s up", "FedBuff", by["fedbuff"] / by["thinwire"]
    trace = [r for r in _json("links.json")["rows"] if (r["model"], r["link"]) == ("gpt2-lab", "trace")]
    kept = {r["recipe"]: r.get("share_in_rounds") or r["share"] for r in trace}
    yield (
        "steps of a model in two stages",
        "LTE trace, 2 to 60 Mbit/s",
        "bf16",
        kept["thinwire"] / kept["bf16"],
    )
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
    figure.tight_layout()
    return figure


def draw_quality() -> Any:
    """Held-out loss against bits a value, every recipe at its best learning rate, three seeds."""
    found = _json("quality.json")
    figure, axes = plt.subplots(figsize=(7, 4))
    for colour, r in zip(cycle(COLOURS), found["recipes"], strict=False):
        losses = r["eval_final_by_seed"]
        axes.scatter([r["bits"]] * len(losses), losses, color=colour, s=14)
        axes.scatter(
            [r["bits"]], [sum(losses) / len(losses)], color=colour, s=60, label=r["recipe"], marker="_"
        )
    axes.set(xscale="log", xlabel="bits a value, forward + backward", ylabel="held-out loss, nats a token")
    axes.set_xticks([5, 10, 20, 30, 64], ["5", "10", "20", "30", "64"])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def draw_auto() -> Any:
    """What ``auto`` saw and did while a link fell from 500 to 20 Mbit/s and rose again."""
    steps = Kept("links").get("whole", "gpt2-lab", "drop", "auto")["steps"]
    times = list(accumulate(s["seconds"] for s in steps))
    figure, (rate, bits, waiting) = plt.subplots(3, 1, figsize=(8, 6), sharex=True)
    for style, (source, way) in zip(("-", "--"), ((0, "forward"), (1, "backward")), strict=True):
        links = [next(k for k in s["links"] if k["source"] == source) for s in steps]
        known = [
            (t, k["rate_bytes_s"] / 125e3) for t, k in zip(times, links, strict=True) if k["rate_bytes_s"]
        ]
        rate.step(*zip(*known, strict=True), where="pre", ls=style, color=COLOURS[2], label=way)
        bits.step(
            times, [s[f"bits_{way}"] for s in steps], where="pre", ls=style, color=COLOURS[1], label=way
        )
    waiting.step(times, [s["wait_s"] / s["seconds"] for s in steps], where="pre", color=COLOURS[0])
    rate.set(yscale="log", ylabel="rate as estimated,\nMbit/s")
    rate.set_yticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
    rate.minorticks_off()
    bits.set(yscale="log", ylabel="bits a value")
    bits.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    bits.minorticks_off()
    waiting.set(ylabel="share of the step\nspent waiting", xlabel="seconds of training")
    rate.legend(frameon=False)
    figure.tight_layout()
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
        axes.set_title(
            f"{found['rate']:g}, every {found['summary']['published_every']:.2g} s, {found['control']}",
            fontsize=10,
        )
    all_axes[0].set(ylabel="age of the version held, s")
    figure.tight_layout()
    return figure
