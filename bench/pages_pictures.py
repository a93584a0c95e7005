"""Tables of pictures: the ways of the demo, how flux-fashion was trained, what is recognised of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.tables import Rows, tabled


@tabled("way", "seconds", "× faster", "a step", "sent a step", "× fewer than fp16", "PSNR")
def pictures(runs: list[dict[str, Any]]) -> Rows:
    """The ways of the demo."""
    first = runs[0]["totals"]["seconds"]
    for r in runs:
        sent, half = r["bytes"]["steady_step"], r["bytes"]["fp16_step"]
        alone, db = r["mode"] == "one", r["quality"].get("psnr_db")
        yield [
            f"`{r['recipe']['name']}`",
            f"{r['totals']['seconds']:.1f} s",
            f"{first / r['totals']['seconds']:.2f}×",
            f"{r['step_seconds']:.2f} s",
            "–" if alone else f"{sent / 1e3:,.0f} kB",
            "–" if alone or not half else f"{half / sent:.1f}×",
            "–" if alone else "equal" if db is None else f"{db:.1f} dB",
        ]


@tabled("steps", "mean loss of 100 steps")
def fashion(found: dict[str, Any]) -> Rows:
    """The loss curve, every few hundred steps."""
    curve = found["curve"]
    for point in curve[:: max(1, len(curve) // 8)]:
        yield [str(point["step"]), f"{point['loss']:.4f}"]


@tabled("sheet", "`--guidance`", "sheets", "garments recognised")
def garments(found: dict[str, Any]) -> Rows:
    """What the classifier makes of real images, and of the model's sheets."""
    yield ["real images, held out", "–", "–", f"{found['held_out']:.1%}"]
    for made in found["sheets"]:
        yield [
            made["sheet"].replace("x", " × "),
            f"{made['guidance']:g}",
            str(made["sheets"]),
            f"{made['accuracy']:.1%}",
        ]


TABLES: dict[str, Callable[[Any], str]] = {"pictures": pictures, "fashion": fashion, "garments": garments}
