"""``thinwire join``: train a swarm's model on this machine, for as long as it likes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.machine.standard_streams import tell
from thinwire.runs.terminal.typer_options import with_config
from thinwire.uses.training.swarm.run.options import SwarmJoinConfig

Keeper = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the keeper listens.")]


@with_config(SwarmJoinConfig, without=("address",))
def join(address: Keeper, given: dict[str, Any]) -> None:
    """Train the model of a swarm until its last round, or until you stop it.

    Fetches the model, dials out only, and goes on after breaks. Ctrl-C leaves; the same name comes back as
    the same member.

    [bold]Examples[/bold]

    thinwire join 192.0.2.7:7300 --token-file secret

    thinwire join 192.0.2.7:7300 --data my-texts --token-file secret

    thinwire join 192.0.2.7:7300 --stages 2 --name anna --token-file secret
    """
    config = SwarmJoinConfig.from_dict(given | {"address": address})
    if config.stages == 2:
        from thinwire.uses.training.swarm.run.pair_program import join_half as joined
    else:
        from thinwire.uses.training.swarm.run.member_program import join as joined

    with stopped_by_signals():
        last = joined(config, (lambda text: None) if config.quiet else tell)
    tell(f"the keeper has its last round, {last}")
