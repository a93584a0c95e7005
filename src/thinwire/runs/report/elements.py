"""Cards that the page of any run is put together from, and the words around them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from thinwire.runs.records.progress import megabytes
from thinwire.runs.report.plotting import SERIES, Runs, series_order

if TYPE_CHECKING:
    from rich.table import Table


def card(title: str, text: str, body: str) -> str:
    """Return a card: its heading, a sentence on it, and its body as HTML."""
    words = f"<p>{html.escape(text)}</p>" if text else ""
    return f'<section class="card"><h2>{html.escape(title)}</h2>{words}{body}</section>\n'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text that scrolls sideways where it is wide."""
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return scroll(head, body)


def scroll(head: Sequence[str], rows: str) -> str:
    """Return a table with its rows as HTML."""
    top = "".join(f"<th>{html.escape(c)}</th>" for c in head)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table></div>'


def dot(variable: str, box: bool = False) -> str:
    """Return a coloured dot, or a box, of the stylesheet's ``variable``."""
    return f'<span class="dot{" box" if box else ""}" style="background:var({variable})"></span>'


def legend(chips: Sequence[tuple[str, str]]) -> str:
    """Return the legend of figures: for each entry its mark, from ``dot``, and its text."""
    items = "".join(f"<span>{mark}{html.escape(text)}</span>" for mark, text in chips)
    return f'<div class="legend">{items}</div>'


def run_legend(runs: Runs) -> str:
    """Return the legend of the runs' colours; none of a single run."""
    if len(runs) < 2:
        return ""
    numbers = series_order(runs)
    return legend([(dot(f"--s{n % SERIES}"), r.label) for r, n in zip(runs, numbers, strict=True)])


def grid(cards: Sequence[str], least: int = 430) -> str:
    """Return cards side by side, as many as there is room for, each at ``least`` so many pixels wide."""
    return f'<div class="grid" style="--least:{least}px">{"".join(cards)}</div>'


def memory(runs: Runs) -> str:
    """Return the card of the processes' memory; none where no run measured it."""
    ranks = max(len(run.record.memory.peak_rss_bytes) for run in runs)
    if not ranks:
        return ""
    held = any(run.record.memory.weights_bytes for run in runs)
    head = ["recipe", *(f"rank {i}" for i in range(ranks))]
    head += [f"weights of rank {i}" for i in range(ranks if held else 0)]
    took = [(run.label, run.record.memory) for run in runs]
    rows = [[label, *map(megabytes, [*m.peak_rss_bytes, *m.weights_bytes])] for label, m in took]
    return card("Peak memory of each process", "Largest resident set, all included.", table(head, rows))


def terminal_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    left: Sequence[int] = (0,),
    wrap: bool = True,
    caption: str = "",
) -> Table:
    """Return a table of plain text: the columns of ``left`` are words, all others numbers.

    Without ``wrap`` a number stays on one line, however narrow the terminal is.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        padding=(0, 2, 0, 0),
        caption=escape(caption) or None,
        caption_justify="left",
    )
    for i, name in enumerate(columns):
        words = i in left
        whole = not (words or wrap)
        table.add_column(escape(name), justify="left" if words else "right", no_wrap=whole, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
