"""``thinwire follow``: keep a copy of a published state, as a file that other programs read."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any

import typer

from thinwire.files.base import shown
from thinwire.links.security import read_token
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.terminal.addresses import limited, parse_place
from thinwire.runs.terminal.typer_options import with_config
from thinwire.types import InputError, require
from thinwire.uses.following.commands.options import FollowConfig

Source = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A publisher's or relay's HOST:PORT, or a store's path or URL."),
]


@with_config(FollowConfig)
def follow(source: Source, given: dict[str, Any]) -> None:
    """Keep a copy of a published state fresh: bit-identical, always the newest version that came.

    Ends with Ctrl-C, or when the publisher of a store says that it has ended. A publisher that goes away is
    waited for.

    [bold]Examples[/bold]

    thinwire follow 192.0.2.7:7200 --token-file secret --out policy.safetensors --state held.safetensors

    thinwire follow s3://bucket/policy --out policy.safetensors --exec 'touch reload'
    """
    config = FollowConfig.from_dict(given)
    place = parse_place(source)
    own = config.relay is None or not isinstance(place, str)
    require(own, InputError, "--relay needs a publisher's HOST:PORT; a store needs no relay")
    token = read_token(config.token_file)
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals())
        stack.enter_context(limited(shown(source)))
        try:
            # After the checks, and not for help: it needs torch.
            from thinwire.uses.following.commands.following import Following

            Following(place, token, config).run(stack)
        except KeyboardInterrupt:  # how it is meant to end
            if config.once:
                raise
