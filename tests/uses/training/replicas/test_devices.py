"""Replicas on different devices: the same bits, and what crosses and is waited for on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from other_device import DEVICE, Elsewhere, Seen
from post_office import PostOffice
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.uses.training.replicas import coder
from thinwire.uses.training.replicas.assembly import Adaptation, synchroniser_of
from thinwire.uses.training.replicas.exchange_methods import Differences, Gradients
from thinwire.uses.training.replicas.recipes import EXCHANGE, REPLICAS
from thinwire.uses.training.replicas.transport import Arrived, ReplicaTally

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = [pytest.param(DEVICE, id="make-believe"), pytest.param(torch.device("cuda"), id="cuda", marks=cuda)]
STEPS, RATE = 6, 0.125
SHAPES = {"a": (300, 40), "b": (7,), "c": (64, 64)}
EXACT = "exchange=Gradients(Scheme(ChunkTopK(0.1), ErrorFeedback()), exact=4)"
COUNTED = [
    "allreduce-bf16",
    "topk",
    EXACT,
    "dd-ef-sgd",
    "deco",
    "cocktail",
    "diloco:every=2",
    "sparseloco:every=2",
]
COUNTED += ["streaming:every=4,fragments=2,late=1"]
UNCOUNTED = ["thinwire:every=2", "auto"]  # entropy coding counts for itself


@contextmanager
def on(device: torch.device) -> Iterator[Seen]:
    if device == DEVICE:
        with Elsewhere() as seen:
            yield seen
    else:
        yield Seen()


class Student:
    """Parameters on a device, and gradients that are drawn on the CPU: the same wherever they go."""

    def __init__(self, rank: int, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(7)
        self.parameters = {n: torch.randn(s, generator=draw).to(device) for n, s in SHAPES.items()}
        self.parameters["c"] = self.parameters["c"].bfloat16()
        self.draw, self.device = torch.Generator().manual_seed(100 + rank), device

    def backward(self) -> None:
        for p in self.parameters.values():
            p.grad = torch.randn(p.shape, generator=self.draw).to(self.device, p.dtype)

    def apply(self) -> None:
        for p in self.parameters.values():
            assert p.grad is not None
            p.sub_(p.grad * RATE)  # in two operations: one alone is rounded in another way on a card


def train(
    name: str, rank: int, office: PostOffice, device: torch.device, exchanges: Callable[[bool], None]
) -> list[Tensor]:
    """Train one replica, and go on from what was saved; return its parameters on the CPU."""
    recipe, student = REPLICAS.parse(name), Student(rank, device)
    method, plan = recipe.schemes[EXCHANGE], recipe.policy and Adaptation(recipe.policy, STEPS)
    synchroniser = synchroniser_of(method, student.parameters, office.network(rank), plan)
    for _ in range(STEPS):
        student.backward()
        exchanges(False)
        synchroniser.step(student.apply)
        exchanges(True)
    synchroniser.drain(student.apply)
    state = synchroniser.state_dict()
    assert all(x.device.type == "cpu" for x in state.values())
    synchroniser.load_state_dict(state)
    student.backward()
    synchroniser.step(student.apply)
    synchroniser.finish(student.apply)
    return [x.cpu() for x in student.parameters.values()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", COUNTED + UNCOUNTED)
def test_a_replica_there_and_one_on_the_cpu_end_with_the_same_bits(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step there has one copy and one wait a message and direction at most."""
    monkeypatch.setattr(coder, "BLOCK", 1 << 13)  # a message of several packets
    office = PostOffice(2)
    with ThreadPoolExecutor(1) as pool, on(device) as seen:

        def exchanges(done: bool) -> None:
            if (
                done and name not in UNCOUNTED
            ):  # what came is asked about once more: whether it could be decoded
                assert seen.to_host <= 2 and seen.to_device <= 1 and len(seen.waits) <= 3, seen
            seen.clear()

        other = pool.submit(train, name, 1, office, torch.device("cpu"), lambda done: None)
        assert all(map(torch.equal, train(name, 0, office, device, exchanges), other.result(60.0)))


@pytest.mark.parametrize("name", ["topk", "sparseloco:every=2"])
def test_packets_that_a_card_makes_one_hold_the_same_values_in_as_many_operations_as_one_had(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where runs are coded by themselves; each operation is a kernel to start."""
    monkeypatch.setattr(coder, "BLOCK", 1 << 18)
    method, shape = REPLICAS.parse(name).schemes[EXCHANGE], (32, 1 << 16)
    assert isinstance(method, (Gradients, Differences))
    flat = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    operations = dict[int, int]()
    for packets in (8, 1):
        monkeypatch.setattr(coder, "TOGETHER", 8 // packets)
        with Elsewhere():
            there, here = (coder.Coder(method.scheme, shape, ReplicaTally(), d) for d in (DEVICE, "cpu"))
            for step in (1, 2):  # the second one's values have a residual
                sent = here.encode(flat * step)
                with Counting() as counted:
                    message = there.encode(flat.to(DEVICE) * step)
                assert message is not None and len(message.packets) == packets
                assert sent is not None and len(sent.packets) == 8
                mean = there.mean(Arrived(0, message.coded, {1: sent.packets}))
                expected = here.mean(Arrived(1, sent.coded, {0: message.packets}))
                assert torch.equal(mean.cpu(), expected) and expected.any()
        operations[packets] = counted.operations
    assert operations[1] < operations[8] / 6, operations


class Counting(TorchDispatchMode):
    """Counts operations that make values, each a kernel on a card."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.operations += not views and "empty" not in func.name()
        return func(*args, **(kwargs or {}))
