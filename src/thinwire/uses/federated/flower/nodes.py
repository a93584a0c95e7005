"""The server's end inside Flower: nodes as clients of a ``Server``, messages as its versions and updates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from thinwire.rounds.aggregation_server import Accepted, Rejected, Server
from thinwire.rounds.client_profile import ClientProfile
from thinwire.rounds.update_messages import Held, Update, VersionForm
from thinwire.types import InputError, PayloadError, require
from thinwire.uses.federated.flower import flwr_names
from thinwire.uses.federated.flower.records import CLIPPED, UPDATE, ArrayLayout, VersionPlan, only

Devices = Callable[[int], ClientProfile]
NO_UPDATE = "it has no update; let compression_mod be the app's first mod"
LEADS_ON = (
    VersionForm.PATCH,
    VersionForm.MISSED,
)  # versions for who holds an earlier one, and with it the layout


def alike(node: int) -> ClientProfile:
    """Return a device of which nothing is known but its id."""
    return ClientProfile(node, step_seconds=1.0, samples=1)


class Nodes:
    """Fill messages to nodes with versions of ``server``, and take their replies.

    Nodes get small ids in the order in which they are first met. What a node says of its number of samples is
    believed, as Flower believes it; ``device`` tells the rest, for policies that ask.
    """

    def __init__(
        self, server: Server, layout: ArrayLayout, feedback: bool, weighted_by: str, device: Devices = alike
    ) -> None:
        self.server, self.layout = server, layout
        self._feedback, self._weighted_by, self._device = feedback, weighted_by, device
        self.ids: dict[int, int] = {}  # of nodes, as the server's clients
        self._given: dict[int, Held | None] = {}
        self._held: dict[int, Held | None] = {}
        self._devices: dict[int, ClientProfile] = {}
        self.refused: list[Rejected] = []

    def join(self, node: int) -> int:
        """Return the client that a node is, which is present from now on."""
        client = self.ids.setdefault(node, len(self.ids))
        if client not in self._devices:
            self._devices[client] = replace(self._device(node), id=client)
        if client not in self.server.clients:
            self.server.join(self._devices[client])
        return client

    def fill(self, message: Any) -> Any:
        """Return the message with the newest version for its node, in place of the arrays."""
        clipped = any(flwr_names.CLIPPING in config for config in message.content.config_records.values())
        require(not (clipped and self._feedback), InputError, CLIPPED)
        client = self.join(message.metadata.dst_node_id)
        version = self.server.issue(client, self._held.pop(client, None))
        self._given[client] = version.held
        layout = None if version.form in LEADS_ON else self.layout
        plan = VersionPlan(version, client, self._feedback, self._weighted_by, layout)
        _, arrays = only(message.content.array_records, "array", "a message of the strategy")
        message.content = plan.put(message.content, self.layout.rest(arrays))
        return message

    def heard(self, reply: Any, node: int) -> bool:
        """Return whether a node's reply is no error; then it holds the version that it was given."""
        if not reply.has_error():
            self._held[self.ids[node]] = self._given.get(self.ids[node])
        return not reply.has_error()

    def take(self, reply: Any, node: int) -> Accepted | Rejected:
        """Take the update in a node's reply to a message of training."""
        client = self.ids[node]
        if not self.heard(reply, node):
            return self._refuse(Rejected(client, str(reply.error.reason)))
        found = [r[UPDATE].data for r in reply.content.array_records.values() if UPDATE in r]
        if not found:
            return self._refuse(Rejected(client, NO_UPDATE))
        with suppress(PayloadError):  # the server says why
            self._note(client, Update.unpack(found[0]).samples)
        answer = self.server.receive(client, found[0])
        return self._refuse(answer) if isinstance(answer, Rejected) else answer

    def samples(self, client: int) -> int:
        """Return how many samples a client said that it has."""
        return self._devices[client].samples

    def rest(self, reply: Any) -> dict[str, Any]:
        """Return what a reply has beside its update; arrays of other shapes are left out."""
        found = next(r for r in reply.content.array_records.values() if UPDATE in r)
        shapes = {n: shape for n, shape, _ in self.layout.arrays}
        return {n: a for n, a in self.layout.rest(found).items() if tuple(a.shape) == shapes[n]}

    def _note(self, client: int, samples: int) -> None:
        device = self._devices[client]
        if samples > 0 and samples != device.samples:
            self._devices[client] = replace(device, samples=samples)
            self.server.join(self._devices[client])

    def _refuse(self, refusal: Rejected) -> Rejected:
        self.refused.append(refusal)
        return refusal
