"""``thinwire recipes``: what can be named after ``--recipe``."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thinwire.cli.output import print_json

Json = Annotated[bool, typer.Option("--json", help="Print the list as JSON, and nothing else, on stdout.")]


def recipes(json: Json = False) -> None:
    """List the recipes: name, parameters with their defaults, what each does and where it comes from."""
    rows = [_plain(name, info) for name, info in _registry().items()]
    if json:
        print_json(rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 1, 0))
    for column in ("recipe", "parameters", "what it sends", "source"):
        table.add_column(column, overflow="fold")
    for row in rows:
        parameters = ", ".join(f"{k}={v}" for k, v in row["parameters"].items()) or "–"
        table.add_row(f"[bold]{row['name']}[/bold]", parameters, row["summary"], row["source"])
    Console().print(table)


def _registry() -> dict[str, Any]:
    from thinwire.recipes import RECIPES

    return dict(RECIPES)


def _plain(name: str, info: Any) -> dict[str, Any]:
    values = (
        dataclasses.asdict(info)
        if dataclasses.is_dataclass(info) and not isinstance(info, type)
        else vars(info)
    )
    return {
        "name": name,
        "parameters": dict(values.get("parameters") or {}),
        "summary": str(values.get("summary") or ""),
        "source": str(values.get("source") or ""),
    }
