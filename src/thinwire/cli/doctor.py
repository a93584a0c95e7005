"""``thinwire doctor``: what this machine has and lacks, in words."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire.cli.output import print_json
from thinwire.lab.diagnosis import BROKEN, LACKS, OK, Check, diagnose
from thinwire.types import InputError

MARKS = {OK: "[green]has[/green]", LACKS: "[yellow]lacks[/yellow]", BROKEN: "[bold red]broken[/bold red]"}
Json = Annotated[
    bool, typer.Option("--json", help="Print the findings as JSON, and nothing else, on stdout.")
]


def doctor(json: Json = False) -> None:
    """Say what this machine has and lacks: versions, processor, memory, models, data, encryption.

    Ends with exit code 2 if thinwire cannot work here at all.
    """
    checks = diagnose()
    if json:
        print_json([dataclasses.asdict(check) for check in checks])
    else:
        _print(checks)
    broken = [check.name for check in checks if check.status == BROKEN]
    if broken:
        raise InputError(f"thinwire cannot work here: {', '.join(broken)}; follow the remedies above")


def _print(checks: list[Check]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for check in checks:
        text = escape(check.finding)
        if check.remedy:
            text += f"\n[dim]→ {escape(check.remedy)}[/dim]"
        table.add_row(MARKS[check.status], check.name, text)
    console = Console()
    console.print(table)
    lacking = sum(check.status == LACKS for check in checks)
    console.print(
        f"\n{len(checks) - lacking} of {len(checks)} in place." if lacking else "\nEverything is in place."
    )
