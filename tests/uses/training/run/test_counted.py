"""The bytes of exchanges in a record are those that its links carried, whatever replicas exchange."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from meshes import meshes, together
from torch import nn

from thinwire.links import LinkShape
from thinwire.runs.machine.compute import ON_CPU
from thinwire.runs.ranks.world import World
from thinwire.uses.training.replicas.assembly import Adaptation, synchroniser_of
from thinwire.uses.training.replicas.networks import over_mesh
from thinwire.uses.training.replicas.recipes import EXCHANGE, REPLICAS
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.training_recorder import TrainRecorder

STEPS, WAY = 4, 0.01  # seconds


Pair = list[TrainRecorder]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The recorders of two ranks, whose links are used by one recipe after the other."""
    out = str(tmp_path_factory.mktemp("counted"))
    config = TrainConfig(model="gpt2-lab", replicas=2, out=out, quiet=True, tensorboard=False)
    about = {"spec": "all", "shape": LinkShape(), "notes": (), "steps": STEPS, "compute": ON_CPU}
    job: Any = SimpleNamespace(config=config, **about)
    with meshes(2, shape=LinkShape(delay=WAY)) as mesh:
        both = [TrainRecorder(job, World(rank, 2, mesh[rank], replicas=2)) for rank in range(2)]
        yield both
        both[0].close("done")


def trained(made: TrainRecorder, name: str) -> dict[str, Any]:
    """Take some steps with a pause behind each, in which messages leave; return this rank's totals."""
    recipe, model = REPLICAS.parse(name), nn.Linear(64, 256)
    with torch.no_grad():
        model.weight.fill_(0.01)
        model.bias.fill_(0.0)
    optimiser, rank = torch.optim.SGD(model.parameters(), 0.1), made.world.rank
    plan = None if recipe.policy is None else Adaptation(recipe.policy, STEPS)
    network, parameters = over_mesh(rank, made.world.peers), dict(model.named_parameters())
    replica = synchroniser_of(recipe.schemes[EXCHANGE], parameters, network, plan)
    for step in range(STEPS):
        made.start_step()
        draw = torch.Generator().manual_seed(2 * step + rank)
        model(torch.randn(8, 64, generator=draw)).square().sum().backward()
        replica.step(optimiser.step)
        optimiser.zero_grad()
        made.links.end_step()
        time.sleep(1.5 * WAY)
    replica.finish(optimiser.step)
    replica.close()
    return made.totals(made.world)


@pytest.mark.parametrize("name", list(REPLICAS.entries))
def test_what_a_recipe_sends_is_counted_once(name: str, pair: Pair) -> None:
    before = pair[0].record.bytes.get(EXCHANGE, 0)
    totals = together([lambda made=made: trained(made, name) for made in pair])
    pair[0].finish(totals)
    record, wire = pair[0].record, sum(counts["payload_bytes"] for t in totals for counts in t["wire"])
    assert pair[0].astray == 0
    assert before < record.bytes[EXCHANGE] == sum(t["watched"] for t in totals)
    assert record.bytes[EXCHANGE] <= wire <= record.bytes[EXCHANGE] + record.bytes["control"]
