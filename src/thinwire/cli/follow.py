"""``thinwire follow``: keep a copy of a published state, as a file that other programs read."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.terminal.command import SECONDS, ShellCommand
from thinwire.cli.terminal.places import (
    Address,
    Congestion,
    MaxGb,
    TokenFile,
    check_file,
    check_seconds,
    check_state,
    largest,
    limited,
    parse_place,
)
from thinwire.engines.sync.using import PATIENCE, POLL
from thinwire.files.place import shown
from thinwire.lab.machine.interrupts import stopped_by_signals
from thinwire.links.security import read_token
from thinwire.links.tcp.congestion import AUTO
from thinwire.types import InputError, require

Source = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A publisher's or relay's HOST:PORT, or a store's path or URL."),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE.safetensors", help="Write each version there, whole or not at all."),
]
Every = Annotated[float, typer.Option(metavar="SECONDS", help="Write at most so often: the newest then.")]
State = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Go on from what was saved there, and save what is held."),
]
Start = Annotated[
    Path | None,
    typer.Option(
        "--base",
        metavar="FILE",
        help="Start from this checkpoint; one patch follows if its values are known.",
    ),
]
Relay = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Serve other followers there, from what comes here.")
]
Execute = Annotated[
    str | None,
    typer.Option(
        "--exec",
        metavar="COMMAND",
        help="Run a shell command after each version, with THINWIRE_VERSION and THINWIRE_FILE set.",
    ),
]
Deadline = Annotated[
    float,
    typer.Option("--exec-timeout", metavar="SECONDS", help="Kill what --exec runs after so long, and go on."),
]
Name = Annotated[
    str | None, typer.Option(help="What the state is called: refuse one that is called anything else.")
]
Once = Annotated[
    bool,
    typer.Option("--once", help="End when the newest version is here, with code 3 if --exec failed."),
]
Poll = Annotated[float, typer.Option(metavar="SECONDS", help="Look into a store so often.")]
Patience = Annotated[
    float, typer.Option(metavar="SECONDS", help="Give up after so long without a sign of the publisher.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no live line.")]


def follow(
    source: Source,
    out: Out = None,
    every: Every = 0.0,
    state: State = None,
    base: Start = None,
    relay: Relay = None,
    congestion: Congestion = AUTO,
    command: Execute = None,
    deadline: Deadline = SECONDS,
    name: Name = None,
    token_file: TokenFile = None,
    once: Once = False,
    poll: Poll = POLL,
    patience: Patience = PATIENCE,
    max_gb: MaxGb = None,
    quiet: Quiet = False,
) -> None:
    """Keep a copy of a published state fresh: bit-identical, always the newest version that came.

    Ends with Ctrl-C, or when the publisher of a store says that it has ended. A publisher that goes away is
    waited for.

    [bold]Examples[/bold]

    thinwire follow 192.0.2.7:7200 --token-file secret --out policy.safetensors --state held.safetensors

    thinwire follow s3://bucket/policy --out policy.safetensors --exec 'touch reload'
    """
    check_seconds(every, "--every", "at least")
    for option, seconds in (("--poll", poll), ("--patience", patience), ("--exec-timeout", deadline)):
        check_seconds(seconds, option)
    place, serve = _places(source, relay)
    patience = max(patience, 2 * poll) if isinstance(place, str) else patience  # a sign is seen at a look
    out, state = _files(out, state)
    token = read_token(token_file)
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals())
        stack.enter_context(limited(shown(source)))
        try:
            # After the checks, and not for help: it needs torch.
            from thinwire.cli.states.following import Following

            known = {"state": state, "name": name, "patience": patience, "max_nbytes": largest(max_gb)}
            run = None if command is None else ShellCommand(command, deadline)
            reading = (place, serve, token, base, congestion, poll, known)
            Following(*reading, out, every, run, once, quiet).run(stack)
        except KeyboardInterrupt:  # how it is meant to end
            if once:
                raise


def _places(source: str, relay: str | None) -> tuple[Address | str, Address | None]:
    """Return whom to follow, and where to serve others, if anywhere."""
    place = parse_place(source)
    serve = None if relay is None else Address.parse(relay, "--relay")
    own = serve is None or not isinstance(place, str)
    require(own, InputError, "--relay needs a publisher's HOST:PORT; a store needs no relay")
    return place, serve


def _files(out: Path | None, state: Path | None) -> tuple[Path | None, Path | None]:
    """Return what to write to for --out and for --state, which are two files."""
    out, state = check_file(out, "--out"), check_state(state)
    apart = out is None or state is None or out.resolve() != state.resolve()
    require(apart, InputError, f"--out and --state are both {out}; give each a file of its own")
    return out, state
