"""What an exchange of differences costs beside training: ``make bench-coder``.

GPT-2 of 124 million parameters on one thread of the CPU. Replicas take 30 steps of AdamW each, on their share
of a text, then exchange: each reads its parameters, codes what they moved by, decodes what others sent, and
goes on. Counted are CPU seconds of one replica for all of that, against 30 steps of 4 samples of 128 tokens.
Messages pass inside the process: what a link costs is not in it. ``python -m bench.training.coder [RECIPE]``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from statistics import median
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.study.cells import Kept, run_study
from thinwire.runs.models.families import import_transformers
from thinwire.types import InputError, LinkError, require
from thinwire.uses.training.replicas.assembly import difference_synchroniser
from thinwire.uses.training.replicas.exchange_methods import Differences
from thinwire.uses.training.replicas.networks import Network
from thinwire.uses.training.replicas.recipes import EXCHANGE, parse_replica_recipe
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.training_job import prepare

KEPT = Kept("coder")
STEPS, SEQ, BATCH = 30, 128, 4
RECIPES = ("thinwire", "factors", "sparseloco", "streaming", "diloco", "pulseloco")
REPLICAS = (2, 4)
GOAL = 0.03  # of a step


class Cell(NamedTuple):
    recipe: str
    replicas: int


def cells() -> Iterator[Cell]:
    """Yield all cells."""
    return (Cell(recipe, n) for n in REPLICAS for recipe in RECIPES)


class _Room:
    """Where replicas of one process leave messages for each other, by name and number."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.left = tuple(range(ranks)), dict[tuple[str, int, int], bytes]()

    def network(self, rank: int) -> Network:
        """Return one replica's network."""
        return Network(lambda name: _Box(self, rank, name), lambda name: _none())


def _none() -> Any:
    raise NotImplementedError("differences are never summed")


class _Box:
    capacity = None

    def __init__(self, room: _Room, rank: int, name: str) -> None:
        self.rank, self.ranks, self._room, self._name = rank, room.ranks, room, name

    def post(self, step: int, payload: bytes) -> int:
        self._room.left[self._name, step, self.rank] = payload
        return len(payload)

    def collect(self, step: int, deadline: float) -> Mapping[int, bytes]:
        found = {r: self._room.left.get((self._name, step, r)) for r in self.ranks if r != self.rank}
        lost = [r for r, data in found.items() if data is None]
        require(not lost, LinkError, f"rank {lost} has not sent exchange {step}")
        return {r: data for r, data in found.items() if data is not None}

    def close(self) -> None:
        """Nothing is under way."""


@lru_cache(maxsize=1)
def trained() -> tuple[list[dict[str, Tensor]], float]:
    """Return the parameters before, and of each replica after its steps; and the CPU seconds of a step."""
    torch.set_num_threads(1)
    job = prepare(TrainConfig(model="gpt2", init="random", data="shakespeare", seq=SEQ, batch=BATCH))
    torch.manual_seed(0)
    model = import_transformers().GPT2LMHeadModel(job.source.config)
    start = copy.deepcopy(model.state_dict())
    found = [_parameters(model)]
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    seconds = [_step(model, optimiser, block) for block in job.train[: 4 * BATCH].split(BATCH)]
    for rank in range(max(REPLICAS)):
        model.load_state_dict(start)
        optimiser = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        for block in job.train[rank * STEPS : (rank + 1) * STEPS]:
            _step(model, optimiser, block[None])
        found.append(_parameters(model))
    return found, median(seconds)


def _parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _step(model: Any, optimiser: torch.optim.Optimizer, ids: Tensor) -> float:
    start = process_time()
    optimiser.zero_grad()
    model(ids, labels=ids).loss.backward()
    optimiser.step()
    return process_time() - start


def measure(cell: Cell) -> dict[str, Any]:
    """Exchange once, all replicas in turn; return a replica's CPU seconds, and its message's bytes."""
    (start, *after), step = trained()
    method = parse_replica_recipe(cell.recipe).schemes[EXCHANGE]
    require(isinstance(method, Differences), InputError, f"{cell.recipe} does not send differences")
    method = replace(method, every=STEPS, late=min(method.late, 1))
    room, replicas = _Room(cell.replicas), []
    for rank in range(cell.replicas):
        own = {name: x.clone() for name, x in start.items()}
        replicas.append((own, difference_synchroniser(method, [own], room.network(rank))))
    for (own, _), moved in zip(replicas, after, strict=False):
        torch._foreach_copy_(list(own.values()), [moved[name] for name in own])
    fragments = [made.fragments for _, made in replicas]
    begun = process_time()
    for each in fragments:
        for fragment in each:
            fragment.send(STEPS, late=min(method.late, 1))
    for each in fragments:
        for fragment in each:
            fragment.land()
    seconds = (process_time() - begun) / cell.replicas
    values = sum(x.numel() for x in start.values())
    sent = sum(map(len, room.left.values())) / cell.replicas
    return {"seconds": seconds, "step": step, "share": seconds / STEPS / step, "bits": 8 * sent / values}


def summary() -> dict[str, Any]:
    """Return a row a cell."""
    return {"goal": GOAL, "rows": [cell._asdict() | (KEPT.get(cell) or {}) for cell in cells()]}


if __name__ == "__main__":
    run_study("coder", sys.argv[1:], cells, measure, summary)
