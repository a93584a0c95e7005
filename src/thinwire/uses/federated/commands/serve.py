"""``thinwire federate-serve``: the server of clients on other machines."""

from __future__ import annotations

import shlex
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
from thinwire.uses.federated.run.options import ROUNDS, ServeConfig
from thinwire.uses.kinds import finish, load_run, load_runs

if TYPE_CHECKING:
    from thinwire.links.hub.hub import Hub
    from thinwire.rounds.client_scheduler import MadeVersion

Method = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD",
        help="How clients and server exchange: thinwire recipes lists them. "
        r"[dim]\[default: thinwire][/dim]",
    ),
]
HELPS = {
    "rounds": f"Versions at most; by default {ROUNDS}.",
    "eval_every": "Versions from one evaluation to the next; 0 makes about 200 evaluations of --rounds.",
}
OF_CLIENTS = ("devices", "downlink", "deploy", "link", "emulate", "workers", "split", "budget")


@with_config(ServeConfig, {"out": "runs/served"}, ("methods",), helps=HELPS, unused=OF_CLIENTS)
def federate_serve(given: dict[str, Any], method: Method = None) -> None:
    """Serve a model that clients on other machines train on data that stay there.

    Begins when --clients of them are there; others may come later, leave, and come back. Keeps the newest
    version in OUT, from which --resume goes on. Off loopback links are encrypted and need a token.

    [bold]Examples[/bold]

    thinwire federate-serve --clients 3 --method thinwire --rounds 50 --host 0.0.0.0 --token-file secret

    thinwire federate-join 192.0.2.7:7300 --data mine.npz --token-file secret
    """
    config = ServeConfig.from_dict(given | ({"methods": shlex.join([method])} if method else {}))
    # After the checks: a wrong option is refused before torch is even imported.
    from thinwire.uses.federated.run.server_program import FederationServer

    fetch_needs(config.data, quiet=config.quiet or config.json)
    out = Path(config.out)
    with holding(out), stopped_by_signals():
        serving = FederationServer(config, _told(config), tell)
        forget(out, REPORT)
        serving.run(_announce)
    finish(load_runs([out]), out, config.json, [load_run(out).to_dict()])


def _announce(hub: Hub) -> None:
    ways = [f"thinwire federate-join {Address(host, hub.port)}" for host in reached_at(hub.host)]
    tell(f"waiting for clients: {' or '.join(ways)}")


def _told(config: ServeConfig) -> Any:
    def told(name: str, made: MadeVersion, accuracy: float | None) -> None:
        if not config.quiet:
            named = f", {accuracy:.1%} of the held-out samples" if accuracy is not None else ""
            tell(f"version {made.number} after {made.at:.0f} s, of {made.updates} updates{named}")

    return told
