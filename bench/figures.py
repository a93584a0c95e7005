"""The figures of the docs, drawn from committed results as SVG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
COLOURS = ("#6b7280", "#d97706", "#2563eb", "#059669", "#7c3aed", "#db2777", "#0891b2", "#65a30d")


def draw_all(folder: Path) -> None:
    """Draw every figure whose results are there."""
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams.update(
        {"svg.hashsalt": "thinwire", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    for name, draw in (("student", draw_student), ("quality", draw_quality)):
        if (RESULTS / f"{name}.json").exists():
            figure = draw()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
            plt.close(figure)


def _json(name: str) -> Any:
    return json.loads((RESULTS / name).read_text("utf-8"))


def smooth(values: list[float], window: int = 10) -> list[float]:
    """Return the mean of each value and those before it, ``window`` at most."""
    parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(p) / len(p) for p in parts]


def draw_student() -> Any:
    """Loss against steps and against bytes, and the energy of each delta."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.4))
    files = sorted((RESULTS / "student").glob("*.json"))
    runs = [r for r in (_json(f"student/{f.name}") for f in files) if "loss" in r]
    for colour, r in zip(COLOURS, runs, strict=False):
        loss = smooth(r["loss"]["train"])
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
    for colour, r in zip(COLOURS, found["recipes"], strict=False):
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
