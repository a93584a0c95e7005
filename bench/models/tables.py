"""Tables of packed language models: ours beside others, and a next version as a patch."""

from __future__ import annotations

from typing import Any

from bench.study.tables import Rows, tabled

LABELS = {
    "source": "as it was",
    "nearest": "one width, rounded to the nearest in groups of 64",
    "lagrangian": "widths chosen by the budget, rounded to the nearest",
    "gptq": "one width in groups of 64, GPTQ's feedback",
    "rounded": "`thinwire` without feedback",
    "rows": "`thinwire` without steps a column",
    "ours": "`thinwire`",
}

FEWER = {"nearest": 0.2, "lagrangian": 0.08}  # of a rival's bytes


@tabled(
    "packed by",
    "bytes",
    "bits a weight",
    "perplexity",
    "times ours",
    "bytes that ours saves at its perplexity",
)
def ways(found: Any) -> Rows:
    """Every way at 3, 3.5 and 4 bits a weight."""
    rows = found["rows"]
    budgets = sorted({r["asked"] for r in rows if r["way"] == "rounded"})
    shown = [r for r in rows if r["way"] == "source"]
    for bits in budgets:
        own = {r["way"]: r for r in rows if r["asked"] == bits}
        shown += [own[way] for way in LABELS if way in own]
    for r in shown:
        name = LABELS[r["way"]] + ("" if r["way"] == "source" else f", {r['asked']:g} bits")
        bits = "–" if r["way"] == "source" else f"{r['bits']:.2f}"
        yield [
            *(name, f"{r['nbytes'] / 1e6:,.1f} MB", bits, _between(r["perplexity"])),
            _between(r["over_ours"], 2) if "over_ours" in r else "–",
            _saved(r),
        ]


@tabled("bits a weight", "bytes", "perplexity")
def curve(found: Any) -> Rows:
    """Ours at every budget."""
    for r in sorted((r for r in found["rows"] if r["way"] == "ours"), key=lambda r: r["nbytes"]):
        yield [f"{r['bits']:.2f}", f"{r['nbytes'] / 1e6:,.1f} MB", _between(r["perplexity"])]


@tabled("goal at 3 bits", "wanted", "found", "met")
def goals(found: Any) -> Rows:
    """What was to be reached at 3 bits, and what was."""
    for r in found["rows"]:
        if r["asked"] == 3 and "over_ours" in r:
            wanted, least = f"lower perplexity than {LABELS[r['way']]}", r["over_ours"][1]
            yield [wanted, "more than 1 times ours", f"{_between(r['over_ours'], 2)} times", _met(least > 1)]
    for way, least in FEWER.items():
        for r in (r for r in found["rows"] if r["way"] == way and r["asked"] == 3):
            saves, wanted = r["ours_saves"], f"fewer bytes than {LABELS[way]} at its perplexity"
            yield [wanted, f"{100 * least:.0f} %", _saved(r), _met(saves is not None and saves >= least)]


def _saved(r: dict[str, Any]) -> str:
    saves = r.get("ours_saves")
    return "–" if saves is None else f"{'at least ' * r['at_least']}{100 * saves:.0f} %"


def _met(yes: bool) -> str:
    return "yes" if yes else "**no**"


@tabled("version", "bytes", "perplexity")
def versions(found: Any) -> Rows:
    """A model, the one that it learned to be, and how the second comes to who has the first."""
    rows = [
        ("first, as it was", found["source"]["nbytes"], found["source"]),
        ("first, packed", found["first"]["nbytes"], found["first"]),
        ("second, as it was", found["tuned"]["nbytes"], found["tuned"]),
        ("second, packed anew", found["anew"]["nbytes"], found["anew"]),
        ("second, a patch of the first, `--like`", found["patch"], found["followed"]),
    ]
    for name, nbytes, row in rows:
        yield [name, f"{nbytes / 1e6:,.1f} MB", f"{row['perplexity']:.1f}"]


def _between(x: list[float], digits: int = 1) -> str:
    mean, low, high = (f"{v:,.{digits}f}" if v < 1000 else f"{v:,.0f}" for v in x)
    return f"{mean} ({low} to {high})"


TABLES = {"models": ways, "models-curve": curve, "models-goals": goals, "versions": versions}
