"""What is learned: a small network, and data that each client makes of its number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FEATURES, HIDDEN, CLASSES, SAMPLES = 32, 256, 10, 200


def network() -> nn.Sequential:
    """Return the model, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def samples(partition: int) -> tuple[Tensor, Tensor]:
    """Return a client's inputs and classes; each client has its own, and another number of them."""
    draw = torch.Generator().manual_seed(100 + partition)
    x = torch.randn(SAMPLES + 20 * partition, FEATURES, generator=draw)
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(7))
    return x, (x @ teacher).argmax(1)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, rate: float) -> float:
    """Take so many steps on all samples; return the last loss."""
    sgd, loss = torch.optim.SGD(model.parameters(), rate), torch.zeros(())
    for _ in range(steps):
        sgd.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        sgd.step()
    return float(loss.detach())


@torch.no_grad()
def accuracy(state: dict[str, Any]) -> float:
    """Return which share of samples that nobody trained on is named right."""
    model = network()
    model.load_state_dict(state)
    x, y = samples(99)
    return float((model(x).argmax(1) == y).float().mean())
