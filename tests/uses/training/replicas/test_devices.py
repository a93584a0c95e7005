"""Replicas whose parameters are on another device: what crosses, what is waited for, and the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from other_device import DEVICE, Elsewhere, Seen
from post_office import PostOffice
from torch import Tensor

from thinwire.uses.training.replicas import coder
from thinwire.uses.training.replicas.assembly import Adaptation, synchroniser_of
from thinwire.uses.training.replicas.recipes import EXCHANGE, REPLICAS
from thinwire.uses.training.replicas.synchroniser import Synchroniser

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = [pytest.param(DEVICE, id="make-believe"), pytest.param(torch.device("cuda"), id="cuda", marks=cuda)]
STEPS, RATE = 6, 0.125
SHAPES = {"a": (300, 40), "b": (7,), "c": (64, 64)}


@contextmanager
def on(device: torch.device) -> Iterator[Seen]:
    if device == DEVICE:
        with Elsewhere() as seen:
            yield seen
    else:
        yield Seen()


class Student:
    """Parameters on a device, and gradients that are drawn on the CPU: the same wherever they go."""

    def __init__(self, rank: int, device: torch.device | str) -> None:
        draw = torch.Generator().manual_seed(7)
        self.parameters = {n: torch.randn(s, generator=draw).to(device) for n, s in SHAPES.items()}
        self.draw, self.device = torch.Generator().manual_seed(100 + rank), device

    def backward(self) -> None:
        for p in self.parameters.values():
            p.grad = torch.randn(p.shape, generator=self.draw).to(self.device)

    def apply(self) -> None:
        for p in self.parameters.values():
            p.sub_(p.grad * RATE)  # in two operations: one alone is rounded in another way on a card


def train(name: str, rank: int, office: PostOffice, device: torch.device | str, seen: Seen) -> list[Tensor]:
    """Train one replica, counting what its exchanges do; return its parameters on the CPU."""
    recipe, student = REPLICAS.parse(name), Student(rank, device)
    plan = None if recipe.policy is None else Adaptation(recipe.policy, STEPS)
    synchroniser = synchroniser_of(recipe.schemes[EXCHANGE], student.parameters, office.network(rank), plan)
    for _ in range(STEPS):
        student.backward()
        seen.clear()
        synchroniser.step(student.apply)
        check(seen, name)
    synchroniser.finish(student.apply)
    state = synchroniser.state_dict()
    assert all(x.device.type == "cpu" for x in state.values())
    return [x.cpu() for x in student.parameters.values()]
