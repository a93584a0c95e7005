"""Clients that take part in the rounds of a server on a port, each on a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from thinwire.links.hub.spoke import Spoke
from thinwire.rounds.client import Client
from thinwire.rounds.client_profile import ClientPace
from thinwire.rounds.remote.remote_client import RemoteClient

PATIENCE = 15.0  # seconds
C = TypeVar("C", bound=Client)


@contextmanager
def guests(
    port: int,
    clients: Sequence[C],
    remote: Callable[[Spoke, C], RemoteClient] = lambda spoke, client: RemoteClient(spoke, PATIENCE),
) -> Iterator[list[threading.Thread]]:
    """Let clients take part, each on a thread; wait for their end."""
    spokes = [Spoke.connect("127.0.0.1", port) for _ in clients]

    def take_part(spoke: Spoke, client: C) -> None:
        guest = remote(spoke, client)
        guest.terms(client.id)
        guest.serve(client, ClientPace(0.01))

    pairs = zip(spokes, clients, strict=True)
    threads = [threading.Thread(target=take_part, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.join(PATIENCE)
        for spoke in spokes:
            spoke.close()
