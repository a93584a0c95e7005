"""The example between real processes of Flower: the same weights as in this one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from flower_apps import REASON, example
from flower_deployment import NODES, deployment, run

from thinwire.uses.federated.flower.local_grid import LocalGrid

flwr = pytest.importorskip("flwr.app", reason=REASON)

ROUNDS = 2


def in_this_process(place: Path) -> bytes:
    """Return the final weights of the example over a grid of ours."""
    config = {"num-server-rounds": ROUNDS, "compress": True, "weights": str(place)}
    grid = LocalGrid(example("client_app").app, {7 + i: {"partition-id": i} for i in range(NODES)})
    context = flwr.Context(1, 1, {}, flwr.RecordDict(), config)
    example("server_app").app(grid, context)
    return place.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_nodes_end_at_the_same_weights(tmp_path: Path, figures: dict[str, Any]) -> None:
    begun = monotonic()
    wanted = in_this_process(tmp_path / "here.bin")
    here = monotonic()
    with deployment(tmp_path) as flower:
        joined = monotonic()
        found = run(flower, **{"num-server-rounds": ROUNDS})
        ended = monotonic()
    assert found == wanted
    figures["deployment"] = {
        "processes": f"1 SuperLink, {NODES} SuperNodes on loopback",
        "rounds": ROUNDS,
        "same_weights": found == wanted,
        "weights": hashlib.sha256(found).hexdigest(),
        "seconds": {
            "in_process": round(here - begun, 2),
            "start": round(joined - here, 1),
            "run": round(ended - joined, 1),
        },
    }
