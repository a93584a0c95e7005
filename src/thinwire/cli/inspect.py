"""``thinwire inspect``: what is in a store, a state, a patch, a checkpoint or a scene, or at a publisher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.links.security import read_token
from thinwire.runs import options as shared
from thinwire.runs.machine.standard_streams import print_json
from thinwire.runs.options import Options, option
from thinwire.runs.terminal.addresses import largest, parse_place
from thinwire.runs.terminal.typer_options import with_config

PATIENCE = 60.0  # seconds that --check waits for more of a state
Source = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A publisher's HOST:PORT, a store's path or URL, or a file."),
]


@dataclass(frozen=True)
class InspectConfig(Options):
    """How closely to look, and how to say what was found."""

    check: bool = option(False, "", "Read everything and check its hashes; exit code 3 if one is wrong.")
    token_file: str | None = shared.token_file()
    max_gb: float | None = shared.max_gb()
    patience: float = shared.seconds(
        PATIENCE, "Give up --check of a publisher after so long without progress."
    )
    json: bool = shared.printed("it as JSON")


@with_config(InspectConfig, file=False)
def inspect(source: Source, given: dict[str, Any]) -> None:
    """Say what a state, a packed scene or a packed model is made of: its parts, and the bytes of each.

    [bold]Examples[/bold]

    thinwire inspect s3://bucket/policy --check

    thinwire inspect scene.tw

    thinwire inspect 192.0.2.7:7200 --token-file secret
    """
    config = InspectConfig.from_dict(given)
    token = read_token(config.token_file)
    place = Path(source) if Path(source).is_file() else parse_place(source)
    # After the checks, and not for help: it needs torch.
    from thinwire.cli.inspecting import find, show

    found = find(place, token, config.check, largest(config.max_gb), config.patience)
    if config.json:
        print_json(found)
    else:
        show(found)
