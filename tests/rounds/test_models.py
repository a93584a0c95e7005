"""Which models train together: one make at all ends, and nothing moves that clients do not share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from each import each
from federation import Same
from torch import Tensor, nn

from thinwire.channels.memory import NoMemory
from thinwire.rounds.aggregation import Synchronous
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client import Client
from thinwire.rounds.client_profile import ClientProfile
from thinwire.rounds.local_training import Samples
from thinwire.rounds.parameters import Parameters, Signature
from thinwire.rounds.residuals import ClientResiduals
from thinwire.types import InputError


class Net(nn.Module):
    """Two layers in any order, as wide as asked, tied or not, with a frozen scale and a fixed buffer."""

    def __init__(self, names: str = "ab", tied: bool = False, frozen: str = "scale", constant: float = 1.0):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(6, 6))
        if tied:
            self.b.weight = self.a.weight
            self.c = nn.Linear(5, 6)  # as many values as without the tie
        self.scale = nn.Parameter(torch.full((6,), constant))
        getattr(self, frozen).requires_grad_(False)
        self.register_buffer("table", torch.full((6,), constant))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.a(x).relu()) * self.scale + self.table
        return found


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight = nn.Parameter(torch.randn(4, 9))


OTHERS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: Net("ba"), "other parameters by name, shape, type or order"),
    (lambda: Net("ab", tied=True), "other parameters"),
    (Wide, "other parameters"),
    (lambda: nn.Sequential(Net()), "other parameters"),
    (lambda: Net(constant=2.0), "other values in what is not trained"),
]


def client_of(model: nn.Module) -> Client:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    return Client(0, model, Samples(x, x.argmax(1), 4), ClientResiduals(NoMemory()))


def server_of(model: nn.Module) -> Server:
    server = Server(Parameters(model), Synchronous(), Same())
    server.join(ClientProfile(0, 0.1, 12))
    server.begin([0])
    return server


@each("other", OTHERS)
def test_a_model_that_only_counts_alike_is_told_apart(other: tuple[Callable[[], nn.Module], str]) -> None:
    make, said = other
    ours, theirs = Signature.of(Net()), Signature.of(make())
    with pytest.raises(InputError, match=said):
        ours.check(theirs, "the model of client 1")
    if ours.digest != theirs.digest:
        client, version = client_of(make()), server_of(Net()).issue(0)
        before = client.sequence
        with pytest.raises(InputError, match="version 0, has other parameters"):
            client.train(type(version).unpack(version.pack()))
        assert client.sequence == before


def test_one_make_is_one_signature_whatever_the_trained_values() -> None:
    torch.manual_seed(1)
    ours, theirs = Signature.of(Net()), Signature.of(Net())
    ours.check(Signature.read(list(theirs)), "the model")
    compiled = nn.Module()
    compiled._orig_mod = Net()
    assert Signature.of(compiled) == ours  # as torch.compile names parameters
    near = Net()
    near.table += 1e-6  # as another processor makes it
    ours.check(Signature.of(near), "the model")


class Moving(nn.Module):
    """A model with something that training moves besides what is trained."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.line, self.kind = nn.Linear(6, 6), kind
        self.register_buffer("mean", torch.zeros(6), persistent=kind != "cache")
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.tensor([float("nan"), 1.0]))
        self.register_buffer("graph", torch.eye(2).to_sparse())
        self.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.extra: Tensor | None
        self.register_buffer("extra", None, persistent=kind == "new")

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.kind in ("mean", "cache"):
                self.mean += 0.1 * (x.mean(0) - self.mean)
            elif self.kind == "count":
                self.count += 1
            elif self.kind == "graph":
                self.graph *= 2
            elif self.kind == "frozen":
                self.frozen.data = self.frozen + x.mean(0)
            elif self.kind == "in place":
                self.frozen += x.mean(0)
            elif self.kind in ("new", "lazy cache") and self.extra is None:
                self.extra = x.new_ones(6)
        found: Tensor = self.line(x - self.mean)
        return found


MOVED = {"mean": "mean", "cache": "mean", "count": "count", "graph": "graph", "frozen": "frozen",
         "in place": "frozen", "new": "extra", "lazy cache": "", "nothing": ""}  # fmt: skip


@each("kind", list(MOVED))
def test_what_training_moves_and_nobody_shares_is_refused_by_name(kind: str) -> None:
    client, version = client_of(Moving(kind)), server_of(Moving(kind)).issue(0)
    if not MOVED[kind]:
        assert client.train(version).samples == 12
        return
    with pytest.raises(InputError, match=f"training moves {MOVED[kind]} of the model"):
        client.train(version)
    assert client.sequence == 0  # nothing is sent


@each("kind", ["lazy", "norm", "half", "thawed"])
def test_models_that_cannot_be_a_row_are_refused(kind: str) -> None:
    models = {"lazy": nn.LazyLinear(3), "norm": nn.BatchNorm1d(6), "half": nn.Linear(2, 2).half()}
    said = {"lazy": "has no shape yet", "norm": "keeps running_mean", "half": "cast what is trained"}
    with pytest.raises(InputError, match=said.get(kind, "are trained")):
        if kind in models:
            Parameters(models[kind])
        model = Net()
        client, version = client_of(model), server_of(Net()).issue(0)
        model.scale.requires_grad_(True)
        client.train(version)
