"""``thinwire publish``: make a checkpoint available, each change of it a version."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.terminal.places import PORT, Congestion, TokenFile, check_state
from thinwire.dtypes import FLOATS, SHORT, name_of
from thinwire.files.resting import PART_REST, REST
from thinwire.lab.machine.interrupts import stopped_by_signals
from thinwire.links.address import check_port
from thinwire.links.security import read_token
from thinwire.links.tcp import congestion as control
from thinwire.types import InputError, require

MAX_SECONDS = 86_400.0  # of --rest and --wait
PUSH, PULL = "For followers that connect", "For followers that fetch"
File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A safetensors file, a model's folder, or a Trainer's output_dir."),
]
Dtype = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]bf16|fp16|fp32",
        help="Cast floats, or those called NAME (* stands for any text), to what followers use; again for "
        "another name, which counts before what is for all.",
    ),
]
Bound = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]ERROR",
        help="Let floats, or the tensor NAME, be off by so much in their own units; again for another name. "
        "What --dtype rounds comes on top, and must not be more.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse what --dtype makes infinite or cuts off, instead of a note."),
]
Host = Annotated[str, typer.Option(help="Address to listen at.", rich_help_panel=PUSH)]
Port = Annotated[
    int | None,
    typer.Option(
        help=f"Port to listen at, {PORT} if there is no --store; 0 takes a free one.", rich_help_panel=PUSH
    ),
]
Store = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Folder or store to write versions to.", rich_help_panel=PULL),
]
Name = Annotated[str, typer.Option(help="What the state is called.")]
State = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Save the newest version there, each minute and at the end, and go on from it: followers need "
        "no keyframe then.",
        rich_help_panel=PUSH,
    ),
]
Once = Annotated[
    bool, typer.Option("--once", help="Publish what is there, and end when a follower or the store has it.")
]
Rest = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help=f"Read what has not changed for so long: {REST:g}, or {PART_REST:g} where only some of several "
        "files have changed since the last version.",
    ),
]
Wait = Annotated[
    float, typer.Option(metavar="SECONDS", help="Wait so long for FILE, if training is still to write it.")
]
Layers = Annotated[
    bool, typer.Option("--layers", help="FILE is a packed scene: publish each of its layers as a version.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no live line.")]


def publish(
    file: File,
    dtype: Dtype = None,
    bound: Bound = None,
    strict: Strict = False,
    host: Host = "127.0.0.1",
    port: Port = None,
    token_file: TokenFile = None,
    state: State = None,
    store: Store = None,
    name: Name = "state",
    rest: Rest = None,
    wait: Wait = 0.0,
    congestion: Congestion = control.AUTO,
    once: Once = False,
    layers: Layers = False,
    quiet: Quiet = False,
) -> None:
    """Make a checkpoint available to followers, and each change of it a version, until Ctrl-C.

    FILE is read when its size and time have rested: see --rest. Of a Trainer's output_dir it is the newest
    checkpoint. Followers connect to --host and --port, or fetch from --store, a path or any URL that fsspec
    writes to; both can be given. With a token links are encrypted, and files in a store are signed.

    [bold]Examples[/bold]

    thinwire publish out/model.safetensors --dtype bf16

    thinwire publish out/ --dtype bf16 --host 0.0.0.0 --token-file secret --store s3://bucket/policy

    thinwire publish scene.tw --layers --host 0.0.0.0 --token-file secret
    """
    token = read_token(token_file)
    port, state = _port(port, store, state), check_state(state)
    dtypes, bounds = parse_dtypes(dtype or []), parse_bounds(bound or [])
    _check_pauses(rest, wait)
    at = None if port is None else (host, port, state, congestion)
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals())
        try:
            # After the checks, and not for help: it needs torch.
            from thinwire.cli.states.publishing import Publishing

            what = (file, rest, wait, layers, dtypes, bounds, name, token, strict)
            Publishing(*what, at, store, once, quiet).run(stack)
        except KeyboardInterrupt:  # how it is meant to end
            if once:
                raise


def _port(port: int | None, store: str | None, state: Path | None) -> int | None:
    """Return the port to listen at; None where there is only a store."""
    port = PORT if port is None and store is None else port
    if port is not None:
        check_port(port, "--port")
    saved = port is not None or state is None
    require(saved, InputError, "--state is for --port; a store is what its publisher needs")
    return port


def _check_pauses(rest: float | None, wait: float) -> None:
    good = rest is None or 0 < rest <= MAX_SECONDS
    require(good, InputError, f"--rest is {rest}; it must be above 0 seconds, and at most {MAX_SECONDS:g}")
    good = 0 <= wait <= MAX_SECONDS
    require(good, InputError, f"--wait is {wait}; it must be 0 seconds or more, and at most {MAX_SECONDS:g}")


def parse_dtypes(texts: list[str]) -> dict[str, str]:
    """Return what --dtype says by name, that for all floats under an empty one. Errors: ``InputError``.

    >>> parse_dtypes(["bf16", "*norm*=fp32"])
    {'': 'bf16', '*norm*': 'fp32'}
    """
    found = {}
    for text in texts:
        name, _, kind = text.rpartition("=")
        told = f"--dtype is {text!r}; it must be one of {', '.join(SHORT)}"
        require(name_of(kind) in FLOATS, InputError, f"{told}, or NAME= and one of them" if name else told)
        found[name] = kind
    return found


def parse_bounds(texts: list[str]) -> dict[str, float] | float | None:
    """Return what --bound says: one bound for all floats, or one by name. Errors: ``InputError``.

    >>> parse_bounds(["1e-4"]), parse_bounds(["head=0.1", "embed=0.2"])
    (0.0001, {'head': 0.1, 'embed': 0.2})
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError as e:
            raise InputError(f"--bound {text!r} is not ERROR or NAME=ERROR; write it like 1e-4") from e
        require(found[name] > 0, InputError, f"--bound is {text}; an error must be above 0")
    mixed = "" in found and len(texts) > 1
    require(not mixed, InputError, "--bound is given for all floats and again; give names, or one number")
    return found.get("", found) if found else None
