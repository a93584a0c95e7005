"""Markdown tables of the docs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps

Rows = Iterator[list[str]]


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table, numbers to the right."""
    body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}", *body])


def tabled(*head: str) -> Callable[[Callable[..., Rows]], Callable[..., str]]:
    """Let a function that yields rows return them as a table."""

    def decorate(rows: Callable[..., Rows]) -> Callable[..., str]:
        return wraps(rows)(lambda *args: table([*head], rows(*args)))

    return decorate
