"""A small federation in this process: random data, a logistic model, a policy that gives all the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, Raw
from thinwire.rounds.aggregation import Rule, Synchronous
from thinwire.rounds.aggregation_server import Accepted, Rejected, Server
from thinwire.rounds.client import Client
from thinwire.rounds.client_profile import Assignment, ClientProfile, Situation
from thinwire.rounds.download import Download
from thinwire.rounds.local_training import Decay, Samples
from thinwire.rounds.parameters import Parameters
from thinwire.rounds.residuals import ClientResiduals

FEATURES, CLASSES = 12, 4
SIZES = (20, 12, 30, 8)  # samples of each client
RATE = 0.2


@dataclass
class Same:
    """Give every device the same assignment, and note when it was asked."""

    steps: int = 2
    codec: Codec = field(default_factory=Raw)
    asked: list[int] = field(default_factory=list)

    def assign(self, devices: Sequence[ClientProfile], situation: Situation) -> list[Assignment]:
        self.asked.append(situation.version)
        return [Assignment(self.steps, self.codec) for _ in devices]


def model() -> nn.Linear:
    """Return the model, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Linear(FEATURES, CLASSES)


def samples(client: int, batch: int = 5) -> Samples:
    """Return a client's data."""
    draw = torch.Generator().manual_seed(50 + client)
    x = torch.randn(SIZES[client], FEATURES, generator=draw)
    return Samples(x, x[:, :CLASSES].argmax(1), batch)


class Federation:
    """A server and four clients, which share a model and one owner of residuals."""

    def __init__(
        self,
        rule: Rule | None = None,
        *,
        codec: Codec | None = None,
        download: Download | None = None,
        residuals: ClientResiduals | None = None,
        steps: int = 2,
        batch: int = 5,
        device: torch.device | str = "cpu",
        serves: bool = False,
    ) -> None:
        """``device``: of the clients' model, and of what the server holds where it ``serves`` there."""
        self.policy, self.residuals = Same(steps, codec or Raw()), residuals or ClientResiduals()
        self.shared = model().to(device)
        start = Parameters(self.shared)
        begun = start.row() if serves else start
        self.server = Server(begun, rule or Synchronous(), self.policy, download, Decay(RATE))
        self.clients = {
            i: Client(i, self.shared, samples(i, batch), self.residuals) for i in range(len(SIZES))
        }
        for i, n in enumerate(SIZES):
            self.server.join(ClientProfile(i, 0.1, n))

    def update(self, client: int) -> bytes:
        """Let a client train from the newest version; return its update."""
        one = self.clients[client]
        return one.train(self.server.issue(client, one.held, one.sequence)).pack()

    def round(self, order: Iterable[int] = range(len(SIZES))) -> None:
        """Let all clients answer, in this order."""
        if self.server.rule.in_rounds:
            self.server.begin(self.clients)
        updates = {i: self.update(i) for i in self.clients}
        for i in order:
            taken(self.server.receive(i, updates[i]))
        if self.server.waiting:
            self.server.close()


def taken(answer: Accepted | Rejected) -> Accepted:
    """Return a receipt."""
    assert isinstance(answer, Accepted), answer
    return answer


def refused(answer: Accepted | Rejected, reason: str) -> None:
    """Check that an update was refused, and why."""
    assert isinstance(answer, Rejected) and reason in answer.reason, answer


def kept(server: Server) -> dict[str, Any]:
    """Return all that a server keeps, but counts of bytes, so that it can be compared."""
    state: dict[str, Any] = {name: x.numpy().tobytes() for name, x in server.state_dict().items()}
    words = json.loads(state["words"])
    for member in words["members"].values():
        del member["traffic"]
    return state | {"words": words}


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two rows are the same bits."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))
