"""Tables of the study that decides what federated papers claim."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.federated.decided import GROUPS
from bench.study.tables import DASH, Draw, Row, Rows, spread, tabled

NAMES = {
    "topk": "Top-k",
    "fixed": "fixed threshold",
    "gamma": "gamma-FedHT, alpha 2",
    "gamma-1": "gamma-FedHT, alpha 1",
    "all": "FedAvg",
    "dagc-r": "DAGC-R",
    "dagc-a": "DAGC-A",
    "one": "one threshold",
    "p0.3333": "DAGC-R, exponent 1/3",
    "p1": "DAGC-R, exponent 1",
    "p1.3333": "DAGC-R, exponent 4/3",
    "fedavg": "FedAvg",
    "fedasync": "FedAsync",
    "fedbuff": "FedBuff",
    "fedluck": "FedLuck",
    "pair": "FedLuck's rule with one pair for all",
    "qafel": "QAFeL",
}

SETTINGS = {
    "logistic-2": "logistic, 2 classes",
    "logistic-3": "logistic, 3 classes",
    "cnn-2": "CNN, 2 classes",
    "cnn-3": "CNN, 3 classes",
    "slow": "CNN, 3 classes, slow",
}


def _of(found: Any, *groups: str) -> list[Row]:
    """Return the rows of some groups, those that have all their seeds."""
    return [r for r in found["rows"] if r["group"] in groups and r["seeds"] == len(GROUPS[r["group"]].seeds)]


def _named(row: Row) -> str:
    return NAMES.get(row["method"], f"`{row['method']}`")


def _density(row: Row, early: bool) -> str:
    """Return the mean share of the values that updates moved in the first fifth, or the last."""
    end = row["versions"][0]
    some = [x for v, x in row["density"] if (v <= end / 5 if early else v > 4 * end / 5)]
    return f"{100 * sum(some) / len(some):.2f} %" if some else DASH


@tabled("setting", "rule", "recipe", "step size", "sent up", "values, first fifth", "last fifth", "accuracy")
def thresholds(found: Any) -> Rows:
    """Rules of gamma-FedHT's setting, at equal traffic but for FedAvg."""
    for r in _of(found, *SETTINGS):
        accuracy = spread([100 * x for x in r["final"]], "{:.1f}") + " %"
        sent = [f"{r['up_share'][0]:.2%}", *(_density(r, early) for early in (True, False))]
        yield [SETTINGS[r["group"]], _named(r), f"`{r['recipe']}`", f"{r['rate']:g}", *sent, accuracy]


@tabled("skew", "rule", "step size", "reached by", "iterations to 70 %", "sent up until then")
def shares(found: Any) -> Rows:
    """Rules of DAGC's setting, to 70 %."""
    for r in _of(found, "skew-10", "skew-100", "power", "skew-1000"):
        skew = r["group"].removeprefix("skew-").replace("power", "100")
        reached = f"{r['reached']} of {r['seeds']}"
        sent = spread(r["until"]["up"], "{:.0f}", 1e3) + " kB"
        yield [skew, _named(r), f"{r['rate']:g}", reached, spread(r["versions"], "{:.1f}"), sent]


@tabled("method", "recipe", "step size", "reached by", "time to 78 %", "sent up", "sent down")
def luck(group: str, found: Any) -> Rows:
    """Methods on FedLuck's links and processors, to 78 %."""
    for r in _of(found, group):
        until, reached = r["until"], f"{r['reached']} of {r['seeds']}"
        sent = [spread(until[way], "{:.1f}", 1e6) + " MB" for way in ("up", "down")]
        time = spread(until["virtual_s"], "{:,.0f}") + " s"
        yield [_named(r), f"`{r['recipe']}`", f"{r['rate']:g}", reached, time, *sent]


TABLES: dict[str, Draw] = {
    "claims-thresholds": thresholds,
    "claims-shares": shares,
    "claims-luck": partial(luck, "luck"),
    "claims-counted": partial(luck, "luck-counted"),  # on the page once it has run
}
