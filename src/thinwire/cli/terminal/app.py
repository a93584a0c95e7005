"""The program: its commands and what they share."""

from __future__ import annotations

from typing import Annotated

import typer

import thinwire
from thinwire.cli.compare import compare
from thinwire.cli.demo import demo
from thinwire.cli.doctor import doctor
from thinwire.cli.emulate import emulate
from thinwire.cli.federate import federate
from thinwire.cli.federate_join import federate_join
from thinwire.cli.federate_serve import federate_serve
from thinwire.cli.follow import follow
from thinwire.cli.generate import generate
from thinwire.cli.inspect import inspect
from thinwire.cli.pack import pack
from thinwire.cli.plan import plan
from thinwire.cli.publish import publish
from thinwire.cli.recipes import recipes
from thinwire.cli.relay import relay
from thinwire.cli.report import report
from thinwire.cli.terminal.errors import CheckedCommand, Program
from thinwire.cli.train import train
from thinwire.cli.unpack import unpack
from thinwire.cli.view import view

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

TRAINING, PICTURES, STATES, PACKAGES, NETWORKS, LOOKING = (
    "Train",
    "Make pictures",
    "Share a state",
    "Ship scenes and models",
    "Networks",
    "Look",
)
app.command(cls=CheckedCommand, rich_help_panel=TRAINING)(train)
app.command(cls=CheckedCommand, rich_help_panel=TRAINING)(compare)
app.command(cls=CheckedCommand, rich_help_panel=TRAINING)(federate)
app.command(cls=CheckedCommand, rich_help_panel=TRAINING)(federate_serve)
app.command(cls=CheckedCommand, rich_help_panel=TRAINING)(federate_join)
app.command(cls=CheckedCommand, rich_help_panel=PICTURES)(generate)
app.command(cls=CheckedCommand, rich_help_panel=STATES)(publish)
app.command(cls=CheckedCommand, rich_help_panel=STATES)(follow)
app.command(cls=CheckedCommand, rich_help_panel=PACKAGES)(pack)
app.command(cls=CheckedCommand, rich_help_panel=PACKAGES)(unpack)
app.command(cls=CheckedCommand, rich_help_panel=PACKAGES)(view)
app.command(rich_help_panel=NETWORKS, context_settings={"allow_interspersed_args": False})(emulate)
app.command(cls=CheckedCommand, rich_help_panel=NETWORKS)(plan)
app.command(cls=CheckedCommand, rich_help_panel=NETWORKS)(relay)
app.add_typer(demo, name="demo", rich_help_panel=LOOKING)
app.command(cls=CheckedCommand, rich_help_panel=LOOKING)(report)
app.command(cls=CheckedCommand, rich_help_panel=LOOKING)(inspect)
app.command(cls=CheckedCommand, rich_help_panel=LOOKING)(recipes)
app.command(cls=CheckedCommand, rich_help_panel=LOOKING)(doctor)


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
