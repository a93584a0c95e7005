"""The tables of ``links`` and ``bench.ground.emulator`` for the docs."""

from __future__ import annotations

from typing import Any

from bench.study.tables import Rows, table, tabled

DASH = "–"


def _cells(found: dict[str, Any], model: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["recipe"], r["link"]): r for r in found["rows"] if r["model"] == model}


def percent(x: float | None) -> str:
    return DASH if x is None else f"{100 * x:.0f} %" if x >= 0.0995 else f"{100 * x:.1f} %"


def _tenths(x: float | None) -> str:
    return DASH if x is None else f"{100 * x:.1f} %"


def _hundredths(x: float | None) -> str:
    return DASH if x is None else f"{x:.2f}×"


def _times(x: float | None) -> str:
    return DASH if x is None else f"{x:.1f}×" if x < 9.95 else f"{x:.0f}×"


def matrix(model: str, found: dict[str, Any]) -> str:
    """Return the table of shares, those made in rounds where there are any: recipes down, links across."""
    cells = _cells(found, model)

    def share(recipe: str, link: str) -> str:
        cell = cells.get((recipe, link), {})
        return percent(cell.get("share_in_rounds") or cell.get("share"))

    recipes = dict.fromkeys(recipe for recipe, _ in cells)
    rows = ([f"`{recipe}`", *(share(recipe, link) for link in found["links"])] for recipe in recipes)
    return table(["recipe", *found["links"]], rows)


@tabled("recipe", "link", "how", "tokens/s", "share, first pass", "share", "communication / compute",
        "MB", "first pass, s", "three passes, s", "held-out loss", "fp32's loss")  # fmt: skip
def details(model: str, found: dict[str, Any]) -> Rows:
    """Return one row a cell, with everything measured."""
    for (recipe, link), r in _cells(found, model).items():
        ratio = r["communication_to_compute"]
        yield [
            f"`{recipe}`",
            link,
            r["how"],
            f"{r['tokens_s']:.0f}",
            percent(r["share_first"]),
            percent(r["share"]),
            DASH if ratio is None else f"{ratio:.2f}",
            f"{r['bytes'] / 1e6:.1f}",
            f"{r['seconds_one_epoch']:.0f}",
            f"{r['seconds']:.0f}",
            DASH if r["eval_final"] is None else f"{r['eval_final']:.3f}",
            {True: "yes", False: "no", None: DASH}[r["same_loss"]],
        ]


@tabled("model", "link", "fp32 keeps", "auto, first step", "first pass", "all", "bound", "of the bound",
        "sooner than AQ-SGD, one pass", "to the loss", "than TAH-Quant", "than direct, 4 bits",
        "than thinwire", "auto reaches the loss")  # fmt: skip
def goals(found: dict[str, Any]) -> Rows:
    """Return ``auto`` against its bound and against the published recipes."""
    for g in found["goals"]:
        versus = g["faster_than"]
        aqsgd = versus.get("aqsgd:fw=4,bw=8", {})
        yield [
            g["model"],
            g["link"],
            percent(g["fp32_keeps"]),
            percent(g["share_step_one"]),
            percent(g["share_first"]),
            percent(g["share"]),
            percent(g["bound"]),
            percent(g["of_bound"]),
            _times(aqsgd.get("one_epoch")),
            _times(aqsgd.get("epochs")),
            _times(versus.get("tahquant", {}).get("epochs")),
            _times(versus.get("direct:bits=4", {}).get("epochs")),
            _times(versus.get("thinwire", {}).get("epochs")),
            {True: "yes", False: "no", None: DASH}[g["same_loss"]],
        ]


@tabled("auto's", "model", "link", "wanted", "found", "met")
def verdicts(found: dict[str, Any]) -> Rows:
    """Return each goal in each cell that it is about, and whether it is met."""
    for v in found["verdicts"]:
        write = _tenths if v["goal"].startswith("share") else _hundredths
        met = {True: "yes", False: "**no**", None: "too close to tell"}[v["met"]]
        yield [v["goal"], v["model"], v["link"], write(v["wanted"]), write(v["found"]), met]


@tabled("link", "recipe", "TCP", "MB", "first step, ms", "one pass, s", "three passes, s",
        "auto sooner, one pass", "three passes", "held-out loss")  # fmt: skip
def in_rounds(study: str, found: dict[str, Any]) -> Rows:
    """Return a study's runs made in rounds: seconds of each round, and how much sooner ``auto`` was."""

    def each(values: list[float], text: str) -> str:
        return " / ".join(format(v, text) for v in values)

    for r in (r for r in found["rounds"] if r["study"] == study):
        yield [
            r["link"],
            f"`{r['recipe']}`",
            r["congestion"],
            f"{r['bytes'] / 1e6:.1f}",
            each([1e3 * v for v in r["step_one"]], ".0f"),
            each(r["one_epoch"], ".1f"),
            each(r["epochs"], ".1f"),
            *(_hundredths(r["sooner"].get(k)) for k in ("one_epoch", "epochs")),
            DASH if r["eval_final"] is None else each(r["eval_final"], ".3f"),
        ]


def relay(found: dict[str, Any]) -> str:
    """Return what share of a core the relay took in the cells, as words."""
    least, most = found["relay_share"]
    return f"between {percent(least)} and {percent(most)}"


@tabled("recipe", "model", "link", "a step took", "predicted", "of it")
def predictions(found: dict[str, Any]) -> Rows:
    """Return what the replay says of runs that were made, beside what they took."""
    for p in found["predictions"]:
        seconds = (f"{1e3 * p[k]:.0f} ms" for k in ("measured", "predicted"))
        yield [
            f"`{p['recipe']}`",
            p["model"],
            p["link"],
            *seconds,
            percent(p["predicted"] / p["measured"]),
        ]


@tabled("recipe", "model", "link", "share, product", "share, end to end", "C of the session",
        "C of runs end to end")  # fmt: skip
def verified(found: dict[str, Any]) -> Rows:
    """Return the cells that were also run from the first step to the last."""
    for v in found["verified"]:
        shares = percent(v["product"]), percent(v["whole"])
        steps = (f"{1e3 * c:.0f} ms" for c in v["c"])
        yield [f"`{v['recipe']}`", v["model"], v["link"], *shares, *steps]
