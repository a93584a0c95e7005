"""``thinwire federate-join``: take part in a federation with data that stay on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.machine.standard_streams import tell
from thinwire.runs.terminal.activity import fetch_needs
from thinwire.runs.terminal.typer_options import with_config
from thinwire.uses.federated.run.options import JoinConfig

Server = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the server listens.")]


@with_config(JoinConfig, without=("address",))
def federate_join(address: Server, given: dict[str, Any]) -> None:
    """Train a server's model on data that stay here, until it has its last version.

    Goes on after breaks, from where its update was. Model, batch and method are the server's.

    [bold]Examples[/bold]

    thinwire federate-join 192.0.2.7:7300 --data mine.npz --token-file secret

    thinwire federate-join localhost:7300 --data digits --part 0/3
    """
    config = JoinConfig.from_dict(given | {"address": address})
    from thinwire.uses.federated.run.client_program import join

    fetch_needs(config.data, quiet=config.quiet)
    with stopped_by_signals():
        last = join(config, (lambda text: None) if config.quiet else tell)
    tell(f"the server has its last version, {last}")
