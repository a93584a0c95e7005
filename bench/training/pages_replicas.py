"""Tables of replicas: every recipe over every link, what delays bear, and the time model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.study.tables import Rows, tabled
from thinwire.links.shape import LinkShape


def recipes(job: str, found: dict[str, Any]) -> str:
    """Return seconds to the target by recipe and link, the soonest of each link in bold."""
    rows = [r for r in found["rows"] if r["job"] == job]
    links = [link for link in found["links"] if any(r["link"] == link for r in rows)]
    of = {(r["recipe"], r["link"]): r for r in rows}
    least = {link: min(_known(rows, link), default=None) for link in links}

    @tabled("recipe", "kB a step", *links)
    def drawn() -> Rows:
        for recipe in dict.fromkeys(r["recipe"] for r in rows):
            mine = [of.get((recipe, link)) for link in links]
            first = next(r for r in mine if r)
            sent = first["bytes"] / 1e3
            yield [f"`{recipe}`", f"{sent:,.1f}" if sent < 100 else f"{sent:,.0f}",
                   *(_cell(r, least[link]) for r, link in zip(mine, links, strict=True))]  # fmt: skip

    return drawn()


def _known(rows: list[dict[str, Any]], link: str) -> list[float]:
    return [r["seconds"] for r in rows if r["link"] == link and r["seconds"] is not None]


def _cell(r: dict[str, Any] | None, least: float | None) -> str:
    if r is None:
        return ""
    if r["seconds"] is None:
        return "not reached"
    text = f"{r['seconds']:.1f} s"
    if r["runs"] == 0:
        text += " (product)"
    return f"**{text}**" if r["seconds"] == least else text


@tabled("model and optimiser", "at once", "1 step late", "2 late", "4 late")
def delays(found: dict[str, Any]) -> Rows:
    """The largest safe learning rate, and the least held-out loss of the row behind it."""
    rows = {(r["model"], r["optimizer"], r["staleness"]): r for r in found["rows"]}
    for model, optimizer in dict.fromkeys((m, o) for m, o, _ in rows):
        yield [
            f"`{model}`, `{optimizer}`",
            *(_safe(rows.get((model, optimizer, late))) for late in (0, 1, 2, 4)),
        ]


def _safe(row: dict[str, Any] | None) -> str:
    if row is None:
        return "refused"
    least = min(loss for _, loss in row["losses"] if loss is not None)
    return f"{row['safe']:g} ({least:.3f})"


@tabled("link", "steps late", "measured step", "by the model", "off by")
def times(found: dict[str, Any]) -> Rows:
    """The time model against measured steps."""
    for r in found["rows"]:
        yield [
            str(LinkShape.parse(r["link"])),
            str(r["staleness"]),
            f"{r['measured'] * 1e3:.0f} ms",
            f"{r['predicted'] * 1e3:.0f} ms",
            f"{100 * r['error']:+.0f} %",
        ]


STUDY: dict[str, Callable[[Any], str]] = {
    "replicas-gpt": partial(recipes, "gpt2-lab"),
    "replicas-cnn": partial(recipes, "cnn-fashion"),
}
TABLES: dict[str, Callable[[Any], str]] = {"delays": delays, "times": times}
