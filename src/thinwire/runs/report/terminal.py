"""Tables for a terminal, as Rich shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


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
