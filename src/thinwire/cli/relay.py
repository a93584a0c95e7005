"""``thinwire relay``: a meeting place for ranks that can only dial out."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinwire.links.address import MAX_RELAYED, RELAY_PORT
from thinwire.links.relay.handshake import is_pass, relay_pass
from thinwire.links.security import REMEDY, read_token
from thinwire.runs import options as shared
from thinwire.runs.machine.standard_streams import tell
from thinwire.runs.options import Options, option
from thinwire.runs.terminal.typer_options import with_config
from thinwire.types import InputError, require

if TYPE_CHECKING:
    from thinwire.links.relay.server import RelayServer


@dataclass(frozen=True)
class RelayConfig(Options):
    """Where a relay listens, and whom it admits."""

    host: str = shared.listen_host("0.0.0.0", more="; by default every one of this machine")
    port: int = shared.listen_port(RELAY_PORT)
    token_file: str | None = shared.token_file(text="File with the ranks' token, or its pass")
    max_connections: int = option(
        MAX_RELAYED, "", "Connections at a time; a pair of ranks takes three.", least=3
    )
    show_pass: bool = option(False, "", "Print the pass made of the ranks' token, for another's relay.")


@with_config(RelayConfig)
def relay(given: dict[str, Any]) -> None:
    """Pass bytes between ranks that can only dial out, without being able to read them. Runs until Ctrl-C.

    Runs on any machine that all ranks reach; they are started with --relay HOST:PORT. If others run that
    machine, give them the pass instead of the token: it admits your ranks, and decrypts nothing.

    [bold]Examples[/bold]

    thinwire relay --port 7000 --token-file secret

    thinwire relay --show-pass --token-file secret > pass
    """
    config = RelayConfig.from_dict(given)
    secret = read_token(config.token_file)
    if secret is None:
        raise InputError(f"a relay admits nobody without a token: {REMEDY}, the same text as on the ranks")
    if config.show_pass:
        require(not is_pass(secret), InputError, "this is a pass already; give the token it is to be made of")
        sys.stdout.write(relay_pass(secret) + "\n")
        return
    if not is_pass(secret):
        tell("note: this relay holds the ranks' token; if others run this machine, use --show-pass")
    import asyncio

    from thinwire.links.relay.server import RelayServer

    asyncio.run(_serve(RelayServer(secret, config.max_connections, tell), config.host, config.port))


async def _serve(server: RelayServer, host: str, port: int) -> None:
    """Serve until Ctrl-C or SIGTERM, which is how a relay ends: no error."""
    import asyncio

    from thinwire.links.address import shown

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop.set)
        except NotImplementedError:  # Windows: a Ctrl-C interrupts the loop instead
            pass
    await server.serve(host, port, stop, lambda at: tell(f"relay listens at {shown(host, at)}"))
    tell(f"relay ended: {server.counts}")
