"""The example of Flower in this process: its client under other mods, and nodes that a test may look into."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.uses.federated.flower.local_grid import LocalGrid
from thinwire.uses.federated.flower.mod import compression_mod
from thinwire.uses.federated.flower.records import ArrayLayout

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
REASON = "flwr is not installed here; make test-flower runs these"
NODES = {11: {"partition-id": 0}, 5: {"partition-id": 1}, 8: {"partition-id": 2}}  # ids in no order
STEPS, RATE = 5, 0.5
Mod = Callable[[Any, Any, Callable[[Any, Any], Any]], Any]


def example(name: str) -> Any:
    """Return a module of the example."""
    from importlib import import_module

    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return import_module(f"compressed_flower.{name}")


def client_app(*mods: Mod, fit: Any = None) -> Any:
    """Return the example's client under these mods."""
    from flwr.clientapp import ClientApp

    app = ClientApp(mods=list(mods))
    app.train()(fit or example("client_app").fit)
    return app


def local_grid(*mods: Mod, fit: Any = None, **options: Any) -> LocalGrid:
    """Return a grid of three nodes; without mods of a test, with ours alone."""
    return LocalGrid(client_app(*(mods or (compression_mod,)), fit=fit), NODES, **options)


def initial() -> Any:
    """Return version 0."""
    from flwr.app import ArrayRecord

    return ArrayRecord(example("task").network().state_dict())


def train_config() -> Any:
    """Return what a plan says, for runs without plans."""
    from flwr.app import ConfigRecord

    return ConfigRecord({"thinwire.steps": STEPS, "thinwire.rate": RATE})


def row(arrays: Any) -> Tensor:
    """Return a model of the example as a row; strategies may return it as float64."""
    return ArrayLayout.of(initial()).row(arrays, "the model")


def accuracy(arrays: Any) -> float:
    """Return how good a model is."""
    return round(example("task").accuracy(arrays.to_torch_state_dict()), 4)


class Losing(LocalGrid):
    """A grid that loses the replies of a node, the first few of them."""

    node, times = 5, 2

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
        found = super().send_and_receive(messages, timeout=timeout)
        lost = [r for r in found if r.metadata.src_node_id == self.node][: self.times]
        self.times -= len(lost)
        return [r for r in found if r not in lost]


class Computed:
    """A mod, the innermost: it adds up what each node computed, in float64."""

    def __init__(self) -> None:
        self.total: dict[int, Tensor] = {}

    def __call__(self, message: Any, context: Any, call_next: Any) -> Any:
        start = row(message.content["arrays"])
        reply = call_next(message, context)
        change = (start - row(reply.content["arrays"])).double()
        self.total[context.node_id] = self.total.get(context.node_id, torch.zeros(1)) + change
        return reply
