"""``thinwire recipes``: the recipes of each engine."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from thinwire.runs.machine.standard_streams import print_json
from thinwire.uses.listing import listed

Json = Annotated[bool, typer.Option("--json", help="Print the list as JSON, and nothing else, on stdout.")]


def recipes(json: Json = False) -> None:
    """List each engine's recipes: what they send, parameters with their defaults, and where they come from.

    Those of the pipeline go after --recipe, those of replicas after --replica-recipe; what those of the state
    do, publish does by --dtype and --bound. Those of diffusion and of experts are for generate, and for
    thinwire.parallel and thinwire.spread_experts in a script; those of federated are for federate, those of
    scenes for pack.

    [bold]Examples[/bold]

    thinwire train --recipe direct:bits=4

    thinwire compare fp32 aqsgd:fw=4,bw=8 thinwire
    """
    rows = listed()
    if json:
        print_json(rows)
        return
    console, engine = Console(), ""
    for row in rows:
        if row["engine"] != engine:
            engine = row["engine"]
            console.rule(f"[bold]{engine}[/bold]", align="left")
        console.print(f"[bold]{escape(row['name'])}[/bold]  {escape(row['summary'])}")
        console.print(Padding(f"[dim]{escape(row['source'])}[/dim]", (0, 0, 0, 2)))
        if row["parameters"]:
            console.print(Padding(_parameters(row["parameters"]), (0, 0, 0, 2)))
        console.print()


def _parameters(parameters: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, p in parameters.items():
        default = name if p["default"] is None else f"{name}={p['default']}"
        table.add_row(f"[cyan]{escape(default)}[/cyan]", escape(f"{p['meaning']}: {p['values']}"))
    return table
