"""Tables of pictures: the ways of the demo and of the study, how flux-fashion was trained, what it makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.study.tables import Rows, tabled
from thinwire.runs.records.progress import decibels


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


def ways(found: dict[str, Any]) -> str:
    """Every way over every link on two ranks: seconds, the least of each link in bold."""
    rows = [r for r in found["rows"] if r["group"] == "two"]
    links = [link for link in found["links"] if any(r["link"] == link for r in rows)]
    of = {(r["way"], r["link"]): r for r in rows}
    least = {link: min(r["seconds"] for r in rows if r["link"] == link) for link in links}

    @tabled("way", "sent a step", "× fewer than fp16", "in all", "PSNR", *links)
    def drawn() -> Rows:
        for way in dict.fromkeys(r["way"] for r in rows):
            mine = [of[way, link] for link in links]
            seconds = [f"{r['seconds']:.1f} s" for r in mine]
            best = [r["seconds"] == least[link] for r, link in zip(mine, links, strict=True)]
            bold = [f"**{s}**" if b else s for s, b in zip(seconds, best, strict=True)]
            yield [f"`{way}`", *_sent(mine[0]), _decibels(mine[0]), *bold]

    return drawn()


def group(name: str, found: dict[str, Any]) -> str:
    """The ways of another group: seconds, unless its ranks share cores."""
    rows = [r for r in found["rows"] if r["group"] == name]
    timed = name in TIMED

    @tabled("way", "sent a step", "× fewer than fp16", "in all", "PSNR", *(["seconds"] if timed else []))
    def drawn() -> Rows:
        for r in rows:
            seconds = [f"{r['seconds']:.1f} s"] if timed else []
            label = r["way"] if ", " in r["way"] else f"`{r['way']}`"
            yield [label, *_sent(r), _decibels(r), *seconds]

    return drawn()


def _sent(r: dict[str, Any]) -> list[str]:
    """Return what was sent a step, and how many times fewer bytes that and all steps are."""
    b = r["bytes"]
    if not b["fp16_step"]:
        return ["–", "–", "–"]
    step, total = b["fp16_step"] / b["steady_step"], b["fp16_total"] / b["total"]
    return [f"{b['steady_step'] / 1e3:,.0f} kB", f"{step:.1f}×", f"{total:.1f}×"]


def _decibels(r: dict[str, Any]) -> str:
    if r["mode"] == "one":
        return "–"
    return decibels(r["psnr_db"])


TIMED = ("guided", "several")
TABLES: dict[str, Callable[[Any], str]] = {
    "diffusion-ways": ways,
    **{f"diffusion-{name}": partial(group, name) for name in ("four", "coding", *TIMED)},
    "pictures": pictures,
    "fashion": fashion,
    "garments": garments,
}
