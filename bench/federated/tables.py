"""Tables of federated learning: every method to one accuracy, and the small studies beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.federated.methods import SHARES, THRESHOLDS
from bench.study.tables import Rows, tabled

Row = Mapping[str, Any]
GOALS = (  # against whom, what, at least how many times
    ("fedluck", "bytes", "bytes in all", 10.0),
    ("fedluck", "up", "bytes sent up", 3.0),
    ("fedluck", "virtual_s", "virtual time", 1 / 0.7),
    ("qafel", "bytes", "bytes in all", 2.0),
)


@tabled("method", "step size", "time to the target", "sent up", "sent down", "in all", "best accuracy")
def methods(group: str, found: Any) -> Rows:
    """Every method of a group, to the target."""
    for r in _of(found, group):
        until = r["until"]
        time = _pm(until["virtual_s"], 1, "{:,.0f}") + " s" if r["reached"] == r["seeds"] else _short(r)
        sent = [_pm(until[name], 1e6, "{:,.2f}") + " MB" for name in ("up", "down", "bytes")]
        yield [f"`{r['method']}`", f"{r['rate']:g}", time, *sent, _percent(r["best"])]


def _short(r: Row) -> str:
    """Return what became of runs that did not all come to the target."""
    seeds, diverged = r["seeds"], r["diverged"]
    if seeds == 1:
        return "diverged" if diverged else "not reached"
    return f"reached by {r['reached']} of {seeds}" + (f", {diverged} diverged" if diverged else "")


@tabled("`thinwire` against", "what", "goal", "measured")
def goals(found: Any) -> Rows:
    """How many times less than others, by means; where a rival did not come to the target, at least that."""
    rows = {r["method"]: r for r in _of(found, "ten")}
    ours = rows.get("thinwire")
    for rival, name, what, goal in GOALS:
        theirs = rows.get(rival)
        if ours is None or theirs is None:
            continue
        times = theirs["until"][name][0] / ours["until"][name][0]
        bound = "more than " if theirs["reached"] < theirs["seeds"] else ""
        short = "" if ours["reached"] == ours["seeds"] else ", without coming to the target itself"
        met = "met" if times >= goal and not short else "missed"
        yield [f"`{rival}`", what, f"{goal:.2g}× less", f"{bound}{times:.1f}× less{short}: {met}"]


def study(group: str, labels: Mapping[str, str], found: Any) -> str:
    """A small study: traffic, density over rounds and accuracy, by label."""
    rows = {r["method"]: r for r in _of(found, group)}
    known = next(iter(rows.values()), None)
    versions = [int(v) for v, _ in known["density"]] if known else []
    shown = versions[:: max(1, len(versions) // 4)]

    @tabled("rule", "recipe", "sent up", *(f"version {v}" for v in shown), "accuracy")
    def drawn() -> Rows:
        for label, method in labels.items():
            if method in rows:
                r = rows[method]
                density = {int(v): share for v, share in r["density"]}
                shares = [f"{density[v]:.2%}" if v in density else "–" for v in shown]
                end = "diverged" if r["diverged"] else _percent(r["final"])
                yield [label, f"`{method}`", f"{r['up_share'][0]:.2%}", *shares, end]

    return drawn()


def _of(found: Any, group: str) -> list[Row]:
    return [r for r in found["rows"] if r["group"] == group]


def _pm(values: list[float], unit: float, form: str) -> str:
    return " ± ".join(form.format(v / unit) for v in values)


def _percent(values: list[float]) -> str:
    return " ± ".join(f"{100 * v:.1f}" for v in values) + " %"


STUDY: dict[str, Callable[[Any], str]] = {
    **{f"federated-{name}": partial(methods, name) for name in ("ten", "free", "phones", "speakers")},
    "federated-goals": goals,
    "federated-gamma": partial(study, "gamma", THRESHOLDS),
    "federated-skew": partial(study, "skew100", SHARES),
    "federated-skew-more": partial(study, "skew1000", SHARES),
}
