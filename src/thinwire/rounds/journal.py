"""What happened at a server, in order, so that one process can do the same again, to the same bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from thinwire.rounds.aggregation_server import Accepted, Rejected, Server
from thinwire.rounds.client import Client
from thinwire.rounds.client_profile import ClientProfile
from thinwire.rounds.update_messages import Held, VersionMessage
from thinwire.types import DesyncError, require


class JournalEntry(NamedTuple):
    """Something that a server was told to do: JSON has the same values."""

    act: str
    client: int = 0
    values: Any = None


class WitnessedServer(Server):
    """A server that keeps a journal of what it is told; ``replay`` makes the same weights of that.

    What one act brings about by itself is written down too: to do it twice changes nothing.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.journal: list[JournalEntry] = []

    def join(self, device: ClientProfile) -> None:
        self.journal.append(JournalEntry("join", device.id, dataclasses.asdict(device)))
        super().join(device)

    def leave(self, client: int) -> int | None:
        self.journal.append(JournalEntry("leave", client))
        return super().leave(client)

    def begin(self, clients: Iterable[int]) -> None:
        asked = list(clients)
        super().begin(asked)
        self.journal.append(JournalEntry("begin", 0, asked))

    def issue(self, client: int, held: Held | None = None, after: int = 0) -> VersionMessage:
        version = super().issue(client, held, after)
        self.journal.append(JournalEntry("issue", client, [held, after]))
        return version

    def receive(self, client: int, data: bytes | memoryview) -> Accepted | Rejected:
        place = len(self.journal)
        found = super().receive(client, data)
        if isinstance(found, Accepted):
            self.journal.insert(place, JournalEntry("receive", client))
        return found

    def give_up(self, client: int) -> int | None:
        self.journal.append(JournalEntry("give_up", client))
        return super().give_up(client)

    def close(self) -> int | None:
        self.journal.append(JournalEntry("close"))
        return super().close()


def replay(journal: Iterable[JournalEntry], server: Server, clients: Mapping[int, Client]) -> None:
    """Do with ``server`` and ``clients``, which are new, what a journal says.

    Errors: ``DesyncError`` where an update is refused that was taken then.
    """
    given: dict[int, VersionMessage] = {}
    for act, client, values in journal:
        if act == "join":
            server.join(ClientProfile(**values))
        elif act == "leave":
            server.leave(client)
        elif act == "begin":
            server.begin(values)
        elif act == "issue":
            held, after = values
            last, trained = given.get(client), clients[client]
            if held and last is not None and last.held == Held(*held) != trained.held:
                trained.follow(last)  # it came, and its update did not
            given[client] = server.issue(client, Held(*held) if held else None, after)
        elif act == "receive":
            found = server.receive(client, clients[client].train(given.pop(client)).pack())
            taken = isinstance(found, Accepted)
            require(taken, DesyncError, f"the update of client {client} was taken, and now: {found}")
        elif act == "give_up":
            server.give_up(client)
        else:
            server.close()
