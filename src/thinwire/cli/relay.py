"""``thinwire relay``: a meeting place for ranks that can only dial out."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.terminal.output import tell
from thinwire.links.address import MAX_RELAYED, RELAY_PORT, check_port
from thinwire.links.relay.handshake import is_pass, relay_pass
from thinwire.links.security import REMEDY, read_token
from thinwire.types import InputError, require

if TYPE_CHECKING:
    from thinwire.links.relay.server import RelayServer

Host = Annotated[str, typer.Option(help="Address to listen at; by default every one of this machine.")]
Port = Annotated[int, typer.Option(help="Port to listen at; 0 takes a free one.")]
TokenFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="File with the ranks' token, or its pass (or set THINWIRE_TOKEN)."),
]
MaxConnections = Annotated[int, typer.Option(help="Connections at a time; a pair of ranks takes three.")]
ShowPass = Annotated[
    bool, typer.Option("--show-pass", help="Print the pass made of the ranks' token, for another's relay.")
]


def relay(
    host: Host = "0.0.0.0",
    port: Port = RELAY_PORT,
    token_file: TokenFile = None,
    max_connections: MaxConnections = MAX_RELAYED,
    show_pass: ShowPass = False,
) -> None:
    """Pass bytes between ranks that can only dial out, without being able to read them. Runs until Ctrl-C.

    Runs on any machine that all ranks reach; they are started with --relay HOST:PORT. If others run that
    machine, give them the pass instead of the token: it admits your ranks, and decrypts nothing.

    [bold]Examples[/bold]

    thinwire relay --port 7000 --token-file secret

    thinwire relay --show-pass --token-file secret > pass
    """
    secret = read_token(token_file)
    if secret is None:
        raise InputError(f"a relay admits nobody without a token: {REMEDY}, the same text as on the ranks")
    if show_pass:
        require(not is_pass(secret), InputError, "this is a pass already; give the token it is to be made of")
        sys.stdout.write(relay_pass(secret) + "\n")
        return
    check_port(port, "--port")
    require(max_connections >= 3, InputError, f"--max-connections is {max_connections}; a pair takes 3")
    if not is_pass(secret):
        tell("note: this relay holds the ranks' token; if others run this machine, use --show-pass")
    import asyncio

    from thinwire.links.relay.server import RelayServer

    asyncio.run(_serve(RelayServer(secret, max_connections, tell), host, port))


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
