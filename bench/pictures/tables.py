"""Tables of pictures: the ways of the demo and of the studies, how models were trained, what they make."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import fmean
from typing import Any

from bench.study.tables import DASH, Draw, Row, Rows, columns, table, tabled
from thinwire.runs.records.progress import decibels

TIMED = ("guided", "several")
SYNC, GOAL, APART = "ep-sync", "dice-residual", 0.05
BYTES, FASTER, BUSY = 0.4, 1.2, 0.5
BASE = {"two": ("two",), "four": ("four",), "parts": ("four",)}  # whose synchronous way is all bytes


@tabled("way", "seconds", "× faster", "a step", "sent a step", "× fewer than fp16", "PSNR")
def pictures(runs: list[dict[str, Any]]) -> Rows:
    """The ways of the demo."""
    yield from _timed(runs)


def _timed(runs: list[dict[str, Any]]) -> Rows:
    first = runs[0]["totals"]["seconds"]
    for r in runs:
        sent, half = r["bytes"]["steady_step"], r["bytes"]["fp16_step"]
        alone = r["mode"] == "one"
        yield [
            f"`{r['recipe']['name']}`",
            f"{r['totals']['seconds']:.1f} s",
            f"{first / r['totals']['seconds']:.2f}×",
            f"{r['step_seconds']:.2f} s",
            DASH if alone else f"{sent / 1e3:,.0f} kB",
            DASH if alone or not half else f"{half / sent:.1f}×",
            DASH if alone else decibels(r["quality"].get("psnr_db")),
        ]


@tabled(
    "way", "seconds", "× faster", "sent a step", "× fewer than fp16", "PSNR", "flicker", "weights of a rank"
)
def clips(runs: list[dict[str, Any]]) -> Rows:
    """The ways of the demo of clips."""
    for r, row in zip(runs, _timed(runs), strict=True):
        weights = max(r["memory"]["weights_bytes"]) / 1e6
        flicker = DASH if r["mode"] == "one" else decibels(r["quality"].get("flicker_db"))
        yield [*row[:3], *row[4:], flicker, f"{weights:.1f} MB"]


def curve(found: Row) -> Iterator[Row]:
    """Yield some points of a loss curve; where experts learnt alone at first, they say so."""
    points = found["curve"]
    for point in points[:: max(1, len(points) // 8)]:
        yield point | {"alone": " (experts alone)" * (point["step"] <= found.get("distilled", 0))}


def _sheets(found: Row) -> Iterator[Row]:
    """Yield what the classifier makes of real images, and of the model's sheets."""
    yield {"sheet": "real images, held out", "guidance": None, "sheets": None, "accuracy": found["held_out"]}
    yield from (made | {"sheet": made["sheet"].replace("x", " × ")} for made in found["sheets"])


def ways(found: Row) -> str:
    """Every way over every link on two ranks: seconds, the least of each link in bold."""
    rows = [r for r in found["rows"] if r["group"] == "two"]
    links = [link for link in found["links"] if any(r["link"] == link for r in rows)]
    of = {(r["way"], r["link"]): r["seconds"] for r in rows}
    least = {link: min(s for (_, k), s in of.items() if k == link) for link in links}

    def seconds(way: str, link: str) -> str:
        text = f"{of[way, link]:.1f} s"
        return f"**{text}**" if of[way, link] == least[link] else text

    first = {r["way"]: r for r in reversed(rows)}
    told = (
        [f"`{w}`", *_sent(first[w]), *(seconds(w, k) for k in links)] for w in dict.fromkeys(w for w, _ in of)
    )
    return table(["way", *SENT, *links], told)


def group(name: str, found: Row) -> str:
    """The ways of another group: seconds, unless its ranks share cores."""
    rows = [r for r in found["rows"] if r["group"] == name]
    labels = [r["way"] if ", " in r["way"] else f"`{r['way']}`" for r in rows]
    seconds = [[f"{r['seconds']:.1f} s"] if name in TIMED else [] for r in rows]
    told = ([label, *_sent(r), *s] for label, r, s in zip(labels, rows, seconds, strict=True))
    return table(["way", *SENT, *(["seconds"] if name in TIMED else [])], told)


SENT = ("sent a step", "× fewer than fp16", "in all", "PSNR")


def _sent(r: Row) -> list[str]:
    """Return what was sent a step, how many times fewer bytes that and all steps are, and the PSNR."""
    b, told = r["bytes"], [DASH, DASH, DASH]
    if b["fp16_step"]:
        step, total = b["fp16_step"] / b["steady_step"], b["fp16_total"] / b["total"]
        told = [f"{b['steady_step'] / 1e3:,.0f} kB", f"{step:.1f}×", f"{total:.1f}×"]
    return [*told, DASH if r["mode"] == "one" else decibels(r["psnr_db"])]


@tabled("layer", "share of the least used expert", "of the most used", "even")
def experts(found: Row) -> Rows:
    """How evenly tokens are shared by the experts of each layer."""
    for i, shares in enumerate(found["experts"], 1):
        yield [str(i), f"{min(shares):.1%}", f"{max(shares):.1%}", f"{1 / len(shares):.1%}"]


def _models(found: Row) -> Iterator[Row]:
    """Yield the distance of each model from real garments, and of real garments from others."""
    yield {"name": "real, held out", "of": [found["floor"]]}
    yield from ({"name": f"`{name}`", "of": sets} for name, sets in found["models"].items())


def halved(values: list[float]) -> str:
    """Return the mean of several values, and half of what lies between the least and the most.

    >>> halved([2.0, 3.0]), halved([2.0])
    ('2.50 ± 0.50', '2.00')
    """
    half = (max(values) - min(values)) / 2
    return f"{fmean(values):.2f}" + (f" ± {half:.2f}" if len(values) > 1 else "")


def expert_ways(name: str, found: Row) -> str:
    """The ways of a group: bytes beside synchronous ones, PSNR, and seconds over each emulated link."""
    rows = [r for r in found["rows"] if r["group"] == name]
    if name == "parts":  # parts after the whole
        rows.sort(key=lambda r: str(r["way"]).partition(":")[0])
    links = [link for link in found["links"] if any("seconds" in r and r["link"] == link for r in rows)]
    of = {(r["way"], r["link"]): r for r in rows}
    base = next((r["nbytes"] for r in found["rows"] if r["way"] == SYNC and r["group"] in BASE[name]), None)

    first = {r["way"]: r for r in reversed(rows)}

    def lines() -> Rows:
        for way in dict.fromkeys(r["way"] for r in rows):
            r, sent = first[way], [DASH] * 3
            if way != "one":
                share = f"{r['nbytes'] / base:.0%}" if base else DASH
                sent = [f"{r['nbytes'] / 1e6:,.1f} MB", share, decibels(r["psnr_db"])]
            cells = [of.get((way, link)) for link in links]
            yield [f"`{way}`", *sent, *(DASH if c is None else f"{c['seconds']:.1f} s" for c in cells)]

    return table(["way", "sent", "of synchronous (16 bits)", "PSNR", *links], lines())


@tabled("way", "sets", "garment distance", "against synchronous", "garments recognised")
def distances(found: Row) -> Rows:
    """How far the pictures of each way are from real garments; against synchronous ones of the same sets."""
    rows = {r["way"]: r for r in found["rows"] if "distance" in r}
    for way, r in rows.items():
        more = [own / base - 1 for own, base in _same_sets(r, rows.get(SYNC))] if way != SYNC else []
        right = f"{fmean(r['accuracy']):.1%}"
        yield [f"`{way}`", str(r["seeds"]), halved(r["distance"]), _percents(more), right]


def _same_sets(r: Row, base: Row | None) -> list[tuple[float, float]]:
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
        return DASH
    mean = f"{fmean(values):+.1%}"
    return mean + (f" ({min(values):+.1%} to {max(values):+.1%})" if len(values) > 1 else "")


@tabled("goal", "wanted", "measured")
def goals(found: Row) -> Rows:
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


def video(name: str, found: Row) -> str:
    """The ways of a group of clips: bytes, PSNR and flicker, and over slow links seconds."""
    rows = [r for r in found["rows"] if r["group"] == name]
    links = [k for k in found["links"] if name == "links" and any(r["link"] == k for r in rows)]
    of = {(r["way"], r["link"]): r for r in rows}

    def told() -> Rows:
        for way, r in {r["way"]: r for r in reversed(rows)}.items():
            alone = r["mode"] == "one"
            flicker = DASH if alone else decibels(r["flicker_db"])
            yield [f"`{way}`", *_sent(r), flicker, *(f"{of[way, k]['seconds']:.1f} s" for k in links)]

    return table(["way", *SENT, "flicker", *links], reversed(list(told())))


TABLES: dict[str, Draw] = {
    "diffusion-ways": ways,
    **{f"diffusion-{name}": partial(group, name) for name in ("four", "coding", *TIMED)},
    "pictures": pictures,
    "clips": clips,
    **{f"video-{name}": partial(video, name) for name in ("bits", "patches", "memory", "four", "links")},
    "wan": columns(curve, ("steps", "{step}"), ("mean loss of 100 steps", "{loss:.4f}")),
    "fashion": columns(curve, ("steps", "{step}"), ("mean loss of 100 steps", "{loss:.4f}")),
    "garments": columns(
        _sheets,
        ("sheet", "{sheet}"), ("`--guidance`", "{guidance:g}"), ("sheets", "{sheets}"),
        ("garments recognised", "{accuracy:.1%}"),
    ),
    "moe": columns(curve, ("steps", "{step}{alone}"), ("mean loss of 100 steps", "{loss:.4f}")),
    "moe-experts": experts,
    "distance": columns(
        _models,
        ("pictures", "{name}"), ("sets", lambda r: str(len(r["of"]))),
        ("garment distance", lambda r: halved([s["distance"] for s in r["of"]])),
        ("garments recognised", lambda r: f"{fmean(s['accuracy'] for s in r['of']):.1%}"),
    ),
    **{f"experts-{name}": partial(expert_ways, name) for name in ("two", "four", "parts")},
    "experts-distance": distances,
    "experts-goals": goals,
}  # fmt: skip
