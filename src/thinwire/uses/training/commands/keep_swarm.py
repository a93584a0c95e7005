"""``thinwire swarm``: keep a model that whoever is there trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.links.address import Address
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.machine.standard_streams import tell
from thinwire.runs.records.folder_lock import holding
from thinwire.runs.records.writer import REPORT, forget
from thinwire.runs.terminal.activity import fetch_needs
from thinwire.runs.terminal.addresses import reached_at
from thinwire.runs.terminal.typer_options import with_config
from thinwire.uses.kinds import finish, load_run, load_runs
from thinwire.uses.training.swarm.run.options import SwarmConfig

if TYPE_CHECKING:
    from thinwire.links.hub.hub import Hub
    from thinwire.uses.training.swarm.run.record import RoundMetrics

Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help=SwarmConfig.__dataclass_fields__["model"].metadata["help"]),
]


@with_config(SwarmConfig, without=("model",))
def swarm(given: dict[str, Any], model: Model = None) -> None:
    """Keep a model that anybody with the token trains, from anywhere, for as long as they like.

    Members join at any time, fetch the model, train their share of the samples and send what changed. They
    need no open port. Updates are checked and scored; those that harm do not count. Keeps the newest round in
    OUT, from which --resume goes on. Off loopback links are encrypted and need a token.

    [bold]Examples[/bold]

    thinwire swarm gpt2-lab --data book.txt --listen 0.0.0.0:7300 --token-file secret

    thinwire join 192.0.2.7:7300 --token-file secret

    thinwire swarm --under 192.0.2.7:7300 --listen 0.0.0.0:7300 --token-file secret
    """
    config = SwarmConfig.from_dict(given | ({"model": model} if model else {}))
    # After the checks: a wrong option is refused before torch is even imported.
    from thinwire.uses.training.swarm.run.branch_program import open_branch
    from thinwire.uses.training.swarm.run.keeper_program import Keeper
    from thinwire.uses.training.swarm.run.standby_program import stand_by

    if not config.under:
        fetch_needs(config.model, config.data, quiet=config.quiet or config.json)
    out = Path(config.out)
    if config.standby:
        with holding(out), stopped_by_signals():
            last = stand_by(config, tell)
        tell(f"the keeper has its last round, {last}")
        return
    with holding(out), stopped_by_signals():
        noted = (lambda text: None) if config.quiet else tell
        keeper = (open_branch if config.under else Keeper)(config, _told(config), noted)
        forget(out, REPORT)
        keeper.run(_announce)
    finish(load_runs([out]), out, config.json, [load_run(out).to_dict()])


def _announce(hub: Hub) -> None:
    ways = [f"thinwire join {Address(host, hub.port)}" for host in reached_at(hub.host)]
    tell(f"waiting for members: {' or '.join(ways)}")


def _told(config: SwarmConfig) -> Any:
    def told(line: RoundMetrics, loss: float | None) -> None:
        if not config.quiet:
            tell(line.sentence(loss))

    return told
