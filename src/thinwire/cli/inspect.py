"""``thinwire inspect``: what is in a store, a state, a patch, a checkpoint or a scene, or at a publisher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.terminal.output import print_json
from thinwire.cli.terminal.places import MaxGb, TokenFile, check_seconds, largest, parse_place
from thinwire.links.security import read_token

PATIENCE = 60.0  # seconds that --check waits for more of a state
Source = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A publisher's HOST:PORT, a store's path or URL, or a file."),
]
Check = Annotated[
    bool,
    typer.Option("--check", help="Read everything and check its hashes; exit code 3 if one is wrong."),
]
Patience = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Give up --check of a publisher after so long without progress."),
]
Json = Annotated[bool, typer.Option("--json", help="Print it as JSON, and nothing else, on stdout.")]


def inspect(
    source: Source,
    check: Check = False,
    token_file: TokenFile = None,
    max_gb: MaxGb = None,
    patience: Patience = PATIENCE,
    json: Json = False,
) -> None:
    """Say what a state, a packed scene or a packed model is made of: its parts, and the bytes of each.

    [bold]Examples[/bold]

    thinwire inspect s3://bucket/policy --check

    thinwire inspect scene.tw

    thinwire inspect 192.0.2.7:7200 --token-file secret
    """
    check_seconds(patience, "--patience")
    token = read_token(token_file)
    place = Path(source) if Path(source).is_file() else parse_place(source)
    # After the checks, and not for help: it needs torch.
    from thinwire.cli.states.inspecting import find, show

    found = find(place, token, check, largest(max_gb), patience)
    if json:
        print_json(found)
    else:
        show(found)
