"""The program: its commands and what they share."""

from __future__ import annotations

from typing import Annotated

import typer

import thinwire
from thinwire.cli.demo import demo
from thinwire.cli.emulate import emulate
from thinwire.cli.inspect import inspect
from thinwire.cli.pack import pack
from thinwire.cli.recipes import recipes
from thinwire.cli.relay import relay
from thinwire.cli.report import report
from thinwire.cli.unpack import unpack
from thinwire.runs.terminal.errors import CheckedCommand, Program
from thinwire.uses import uses
from thinwire.uses.use import LOOKING, NETWORKS, PACKAGES, PANELS

EXIT_CODES = (
    "Exit codes: 0 done, 2 bad input, 3 a peer or link lost, 4 an invalid measurement, 130 interrupted."
)

app = typer.Typer(
    name="thinwire",
    cls=Program,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    epilog=EXIT_CODES,
)

# Commands of several uses, or of none.
GENERAL = (
    (pack, PACKAGES),
    (unpack, PACKAGES),
    (relay, NETWORKS),
    (report, LOOKING),
    (inspect, LOOKING),
    (recipes, LOOKING),
)


def _add_commands() -> None:
    """Add the commands of every use, and the general ones, panel by panel."""
    of_uses = [(use.named(command.home), command.panel) for use in uses() for command in use.commands]
    for panel in PANELS:
        for function in (f for f, its in (*GENERAL, *of_uses) if its == panel):
            app.command(cls=CheckedCommand, rich_help_panel=panel)(function)
        if panel == NETWORKS:
            interspersed = {"allow_interspersed_args": False}  # the options behind a program are its own
            app.command(rich_help_panel=panel, context_settings=interspersed)(emulate)
        if panel == LOOKING:
            app.add_typer(demo, name="demo", rich_help_panel=panel)


_add_commands()


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"thinwire {thinwire.__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
]


@app.callback()
def program(version: Version = False) -> None:
    """Train, run and share models over slow links by sending compressed changes."""
