"""Markdown tables of the docs, and how they write numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from string import Formatter
from typing import Any

DASH = "–"
Rows = Iterator[list[str]]
Row = Mapping[str, Any]
Draw = Callable[[Any], str]
# What a format may end with: thousands, millions, thousandths, hundredths.
SCALES: dict[str, Callable[[float], float]] = {
    "k": lambda x: x / 1e3,
    "M": lambda x: x / 1e6,
    "m": lambda x: 1e3 * x,
    "c": lambda x: 100 * x,
}


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table, numbers to the right."""
    body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}", *body])


def tabled(*head: str) -> Callable[[Callable[..., Rows]], Callable[..., str]]:
    """Let a function that yields rows return them as a table."""

    def decorate(rows: Callable[..., Rows]) -> Callable[..., str]:
        return wraps(rows)(lambda *args: table([*head], rows(*args)))

    return decorate


def columns(
    rows: str | Callable[..., Iterable[Row]], *heads: tuple[str, str | Callable[[Any], str]]
) -> Callable[..., str]:
    """Return what draws a table: its rows by key or function of a result, its columns by head.

    A column is text with fields of the row, or a function of the row.

    >>> print(columns("rows", ("way", "`{name}`"), ("sent", "{nbytes:.1fM} MB"))(
    ...     {"rows": [{"name": "a", "nbytes": 2_500_000}]}))
    | way | sent |
    |---|---:|
    | `a` | 2.5 MB |
    """

    def drawn(*args: Any) -> str:
        found = rows(*args) if callable(rows) else args[-1][rows]
        cells = ([c(r) if callable(c) else written(c, r) for _, c in heads] for r in found)
        return table([head for head, _ in heads], cells)

    return drawn


class _Written(Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            return DASH
        if spec[-1:] in SCALES:
            return format(SCALES[spec[-1]](value), spec[:-1])
        return format(value, spec)


def written(text: str, row: Row) -> str:
    """Return a text with the fields of a row; what is None is a dash.

    >>> written("{x:.1fc} % of {y}", {"x": 0.25, "y": None})
    '25.0 % of –'
    """
    return _Written().vformat(text, (), row)


def percent(x: float | None) -> str:
    """Return a share, with a digit behind the point where it is below 10 %."""
    return DASH if x is None else f"{100 * x:.0f} %" if x >= 0.0995 else f"{100 * x:.1f} %"


def times(x: float | None) -> str:
    """Return a ratio, with a digit behind the point where it is below 10."""
    return DASH if x is None else f"{x:.1f}×" if x < 9.95 else f"{x:.0f}×"


def yes(ok: bool | None, no: str = "no", unknown: str = DASH) -> str:
    """Return whether something is so."""
    return unknown if ok is None else "yes" if ok else no


def spread(values: Iterable[float], form: str, unit: float = 1.0) -> str:
    """Return a mean and half its interval, or a mean alone.

    >>> spread([2.0, 0.5], "{:.1f}"), spread([3000.0], "{:.0f}", 1e3)
    ('2.0 ± 0.5', '3')
    """
    return " ± ".join(form.format(v / unit) for v in values)
