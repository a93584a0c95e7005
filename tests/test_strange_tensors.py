"""Tensors of any strides and of no dimension, in what each engine is given: the results of plain ones."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from typing import Any

import torch
from each import each
from federation import kept, taken
from meshes import Mesh, meshes, together
from picture_models import flux, flux_inputs
from post_office import PostOffice, on_each
from torch import Tensor, nn

import thinwire
from thinwire.channels.channel import Scheme
from thinwire.channels.memory import Delta
from thinwire.channels.references import TensorStore
from thinwire.codecs import Codec, Raw, TopK, Uniform
from thinwire.rounds.aggregation import Synchronous
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client import Client
from thinwire.rounds.client_profile import Assignment, ClientProfile
from thinwire.rounds.local_training import Decay, Samples
from thinwire.rounds.parameters import Parameters
from thinwire.rounds.residuals import ClientResiduals
from thinwire.uses.training.pipeline.boundary import Incoming, Outgoing
from thinwire.uses.training.pipeline.compressed_stage import StageTally
from thinwire.uses.training.replicas.assembly import synchroniser_of
from thinwire.uses.training.replicas.recipes import EXCHANGE, REPLICAS


def strided(x: Tensor) -> Tensor:
    """Return the same values, every other one of twice as many, their dimensions in memory turned round."""
    turned = x.new_zeros(*reversed(x.shape), 2)[..., 0]
    return turned.permute(list(reversed(range(x.dim())))).copy_(x)


class Strange(nn.Module):
    """A model of a transposed weight, every other value of a bias, a scalar and an empty parameter."""

    def __init__(self, strange: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        made = strided if strange else torch.clone
        for name, shape in (("weight", (12, 4)), ("bias", (4,)), ("scale", ()), ("none", (0, 3))):
            self.register_parameter(name, nn.Parameter(made(torch.randn(shape, generator=draw))))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = (x @ self.weight + self.bias) * self.scale
        return found


class Across:
    """Neighbours whose messages are at the other end at once."""

    def __init__(self) -> None:
        self.mailbox, self.bodies = self, dict[bytes, bytes]()

    def send(self, tag: bytes, body: Any, label: str = "control") -> Future[None]:
        self.bodies[tag], done = bytes(body), Future[None]()
        done.set_result(None)
        return done

    def get(self, tag: bytes, deadline: float, what: str) -> bytes:
        return self.bodies.pop(tag)

    def wire_bytes(self, tag: bytes, nbytes: int) -> int:
        return nbytes

    def fail(self, error: Exception) -> None:
        raise error


@each("codec", [Raw(), Uniform(4)])
@each("far", [torch.float32, torch.bfloat16])
def test_a_stage_sends_and_fills_them_and_the_ends_may_have_other_dtypes(
    codec: Codec, far: torch.dtype
) -> None:
    scheme, landed = Scheme(codec, Delta(), Raw(), Raw()), []
    for made in (torch.clone, strided):
        out = Outgoing("forward", 0, scheme, TensorStore(), StageTally(), own_lane=False)
        into, across = Incoming("forward", 1, TensorStore(), StageTally(), 60.0, own_lane=False), Across()
        draw = torch.Generator().manual_seed(2)
        for step in range(2):
            x = made(torch.randn(3, 4, 6, generator=draw).bfloat16())
            buffer = made(torch.zeros(3, 4, 6, dtype=far))
            assert x.is_contiguous() == buffer.is_contiguous() == (made is torch.clone)
            out.send(across, step, x, [0, 1, 2], training=True)
            into.expect(step, buffer, across)
            assert into.land(step, more=False) == [0, 1, 2]
            landed.append(buffer)
            assert codec != Raw() or torch.equal(buffer.float(), x.float())
    assert all(torch.equal(a, b) for a, b in zip(landed[:2], landed[2:], strict=True))


@each("name", ["allreduce", "topk", "diloco:every=2", "thinwire:every=2"])
def test_replicas_average_them(name: str) -> None:
    def train(strange: bool) -> list[Tensor]:
        office = PostOffice(2)

        def work(rank: int) -> list[Tensor]:
            model = Strange(strange)
            draw, parameters = torch.Generator().manual_seed(rank), dict(model.named_parameters())
            synchroniser = synchroniser_of(
                REPLICAS.parse(name).schemes[EXCHANGE], parameters, office.network(rank)
            )
            optimiser = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(4):
                optimiser.zero_grad()
                model(torch.randn(5, 12, generator=draw)).square().sum().backward()
                synchroniser.step(optimiser.step)
            synchroniser.finish(optimiser.step)
            return [p.detach() for p in parameters.values()]

        ours, theirs = on_each(2, work)
        assert all(map(torch.equal, ours, theirs))
        return ours

    assert all(map(torch.equal, train(False), train(True)))


class Coded:
    """A policy that gives all the same."""

    def assign(self, devices: Any, situation: Any) -> list[Assignment]:
        return [Assignment(3, TopK(0.2)) for _ in devices]


def test_clients_train_them_and_a_server_starts_from_them() -> None:
    def rounds(strange: bool) -> dict[str, Any]:
        server = Server(Parameters(Strange(strange)), Synchronous(), Coded(), rates=Decay(0.01))
        x = torch.randn(20, 12, generator=torch.Generator().manual_seed(4))
        data = Samples(strided(x) if strange else x, x[:, :4].argmax(1), 5)
        client = Client(0, Strange(strange), data, ClientResiduals())
        server.join(ClientProfile(0, 0.1, 20))
        for _ in range(3):
            server.begin([0])
            taken(server.receive(0, client.train(server.issue(0, client.held, client.sequence)).pack()))
        return kept(server)

    assert rounds(False) == rounds(True)


def test_pictures_are_made_of_them_by_two_models_of_one_process() -> None:
    """Both are taken apart over one mesh, and called in turn."""
    models = flux(), flux(3)

    def rank(peers: Mesh) -> list[Tensor]:
        first, second = copy.deepcopy(models)
        options: dict[str, Any] = {"deadline": 60.0}
        with (
            torch.no_grad(),
            thinwire.parallel(first, peers, "compact", **options),
            thinwire.parallel(second, peers, "raw", **options),
        ):
            made = []
            for time in (1.0, 0.5):
                plain = flux_inputs(63, time)
                odd = {n: strided(x) if isinstance(x, Tensor) else x for n, x in plain.items()}
                made += [model(**odd)[0] for model in (first, second)]
            return made

    with meshes(2) as two:
        here, there = together([lambda peers=peers: rank(peers) for peers in two])
    assert all(map(torch.equal, here, there))
    with torch.no_grad():
        wanted = [model(**flux_inputs(63, time))[0] for time in (1.0, 0.5) for model in models]
    assert all(torch.allclose(*pair, atol=0.05) for pair in zip(here, wanted, strict=True))
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(here[1::2], wanted[1::2], strict=True))
