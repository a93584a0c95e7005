"""Tables of flux-fashion-moe: its training, its experts, its distance, and its experts over several ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

from bench.study.tables import Rows, tabled
from thinwire.runs.records.progress import decibels

SYNC, GOAL, APART = "ep-sync", "dice-residual", 0.05
BYTES, FASTER, BUSY = 0.4, 1.2, 0.5
BASE = {"two": ("two",), "four": ("four",), "parts": ("four",)}  # whose synchronous way is all bytes


@tabled("steps", "mean loss of 100 steps")
def training(found: dict[str, Any]) -> Rows:
    """The loss curve: of the experts alone at first, then of the whole model."""
    for point in found["curve"][:: max(1, len(found["curve"]) // 8)]:
        alone = " (experts alone)" if point["step"] <= found["distilled"] else ""
        yield [f"{point['step']}{alone}", f"{point['loss']:.4f}"]


@tabled("layer", "share of the least used expert", "of the most used", "even")
def experts(found: dict[str, Any]) -> Rows:
    """How evenly tokens are shared by the experts of each layer."""
    for i, shares in enumerate(found["experts"], 1):
        yield [str(i), f"{min(shares):.1%}", f"{max(shares):.1%}", f"{1 / len(shares):.1%}"]


@tabled("pictures", "sets", "garment distance", "garments recognised")
def distance(found: dict[str, Any]) -> Rows:
    """The distance of each model from real garments, and of real garments from others."""
    floor = found["floor"]
    yield ["real, held out", "1", f"{floor['distance']:.2f}", f"{floor['accuracy']:.1%}"]
    for name, sets in found["models"].items():
        of = [s["distance"] for s in sets]
        right = fmean(s["accuracy"] for s in sets)
        yield [f"`{name}`", str(len(sets)), spread(of), f"{right:.1%}"]


def spread(values: list[float]) -> str:
    """Return the mean of several values, and half of what lies between the least and the most.

    >>> spread([2.0, 3.0]), spread([2.0])
    ('2.50 ± 0.50', '2.00')
    """
    half = (max(values) - min(values)) / 2
    return f"{fmean(values):.2f}" + (f" ± {half:.2f}" if len(values) > 1 else "")


def ways(name: str, found: dict[str, Any]) -> str:
    """The ways of a group: bytes beside synchronous ones, PSNR, and seconds over each emulated link."""
    rows = [r for r in found["rows"] if r["group"] == name]
    rows.sort(
        key=lambda r: str(r["way"]).partition(":")[0] if name == "parts" else ""
    )  # parts after the whole
    links = [link for link in found["links"] if any("seconds" in r and r["link"] == link for r in rows)]
    of = {(r["way"], r["link"]): r for r in rows}
    base = next((r["nbytes"] for r in found["rows"] if r["way"] == SYNC and r["group"] in BASE[name]), None)

    @tabled("way", "sent", "of synchronous (16 bits)", "PSNR", *links)
    def drawn() -> Rows:
        for way in dict.fromkeys(r["way"] for r in rows):
            first = next(r for r in rows if r["way"] == way)
            cells = [of.get((way, link)) for link in links]
            seconds = ["–" if c is None else f"{c['seconds']:.1f} s" for c in cells]
            yield [f"`{way}`", *_sent(first, base), *seconds]

    return drawn()


@tabled("way", "sets", "garment distance", "against synchronous", "garments recognised")
def distances(found: dict[str, Any]) -> Rows:
    """How far the pictures of each way are from real garments; against synchronous ones of the same sets."""
    rows = {r["way"]: r for r in found["rows"] if "distance" in r}
    for way, r in rows.items():
        same = _same_sets(r, rows.get(SYNC))
        more = [own / base - 1 for own, base in same] if way != SYNC else []
        yield [
            f"`{way}`",
            str(r["seeds"]),
            spread(r["distance"]),
            _percents(more),
            f"{fmean(r['accuracy']):.1%}",
        ]


def _same_sets(r: dict[str, Any], base: dict[str, Any] | None) -> list[tuple[float, float]]:
    """Return the distances of a way and of the synchronous one, of each set that both have."""
    known = dict(zip(base["seed"], base["distance"], strict=True)) if base else {}
    pairs = zip(r["seed"], r["distance"], strict=True)
    return [(own, known[seed]) for seed, own in pairs if seed in known]


def _percents(values: list[float]) -> str:
    """Return the mean of several shares, and the least and the most.

    >>> _percents([0.01, 0.03]), _percents([0.01]), _percents([])
    ('+2.0% (+1.0% to +3.0%)', '+1.0%', '–')
    """
    if not values:
        return "–"
    mean = f"{fmean(values):+.1%}"
    return mean + (f" ({min(values):+.1%} to {max(values):+.1%})" if len(values) > 1 else "")


@tabled("goal", "wanted", "measured")
def goals(found: dict[str, Any]) -> Rows:
    """What was set for residuals on all parts of DICE, as far as it is measured."""
    of = {(r["group"], r["link"], r["way"]): r for r in found["rows"]}
    for (group, link, way), r in of.items():
        base = of.get((group, link, SYNC))
        if way != GOAL or base is None:
            continue
        if group == "distance" and (same := _same_sets(r, base)):
            apart = max(base["distance"]) - min(base["distance"])
            value, synchronous = (fmean(of) for of in zip(*same, strict=True))
            bound = synchronous * (1 + APART) + apart
            yield ["garment distance", f"at most {bound:.2f}", _verdict(f"{value:.2f}", value <= bound)]
        elif group == "four":
            share = r["nbytes"] / base["nbytes"]
            yield ["bytes of synchronous", f"at most {BYTES:.0%}", _verdict(f"{share:.0%}", share <= BYTES)]
        elif group == "two" and base["waited"] >= BUSY:
            gain = base["seconds"] / r["seconds"]
            yield [f"faster over {link}", f"at least {FASTER:.1f}×", _verdict(f"{gain:.2f}×", gain >= FASTER)]


def _verdict(value: str, met: bool) -> str:
    return f"{value}: {'met' if met else 'missed'}"


def _sent(r: dict[str, Any], base: float | None) -> list[str]:
    if r["way"] == "one":
        return ["–"] * 3
    share = f"{r['nbytes'] / base:.0%}" if base else "–"
    return [f"{r['nbytes'] / 1e6:,.1f} MB", share, decibels(r["psnr_db"])]


TABLES: dict[str, Callable[[Any], str]] = {
    "moe": training,
    "moe-experts": experts,
    "distance": distance,
    **{f"experts-{name}": partial(ways, name) for name in ("two", "four", "parts")},
    "experts-distance": distances,
    "experts-goals": goals,
}
