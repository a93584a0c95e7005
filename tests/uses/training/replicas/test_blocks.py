"""Differences are exchanged block by block: with the values of the rules, and in little memory."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import pytest
import torch
from live_tensors import LiveTensors
from post_office import PostOffice, on_each
from torch import Tensor

from thinwire.uses.training.replicas import coder
from thinwire.uses.training.replicas.assembly import synchroniser_of
from thinwire.uses.training.replicas.coder import Coder
from thinwire.uses.training.replicas.exchange_methods import Differences
from thinwire.uses.training.replicas.flat_parameters import FlatParameters
from thinwire.uses.training.replicas.local_steps import LocalSteps
from thinwire.uses.training.replicas.networks import Network
from thinwire.uses.training.replicas.recipes import EXCHANGE, REPLICAS
from thinwire.uses.training.replicas.transport import Arrived, CodedMessage, ReplicaTally

RANKS, STEPS = 3, 8
SHAPES = {"a": (300, 40), "b": (7,), "c": (64, 64), "d": (), "e": (513, 9)}
RULES = [
    "cocktail",
    "diloco:every=2",
    "sparseloco:every=2",
    "streaming:every=4,fragments=1,late=1",
    "thinwire:every=3,late=2",
    "pulseloco:every=2",
    "exchange=Differences(Scheme(), every=3, late=2, rate=0.7, momentum=0.9)",
    "exchange=Differences(Scheme(Uniform(3), ErrorFeedback(decay=0.9)), every=3, visible='float16', late=1)",
]
EXACT = [("diloco:every=2", False), ("thinwire:every=3,late=2", False)]
COPIES = {"thinwire:every=3": 2, "sparseloco:every=3": 2, "diloco:every=3": 2}
COPIES |= {"streaming:every=6": 3, "pulseloco:every=3": 3}  # what is owed, and an outer momentum
ROOM = 0.6  # copies: some blocks of 1/16, beside the message itself


class Student:
    """Parameters, of one dtype or of several and some not in one piece, and steps drawn for each replica."""

    def __init__(self, rank: int, mixed: bool) -> None:
        draw = torch.Generator().manual_seed(7)
        self.parameters = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
        if mixed:
            self.parameters["c"] = self.parameters["c"].bfloat16()
            self.parameters["e"] = self.parameters["e"].t()
            self.parameters["f"] = torch.randn(5, generator=draw, dtype=torch.complex64)
        self.draw = torch.Generator().manual_seed(100 + rank)

    def step(self) -> None:
        for p in self.parameters.values():
            p.sub_(torch.randn(p.shape, generator=self.draw, dtype=p.dtype) * 0.125)


class Whole:
    """A replica by the rules of ``Differences``, all values at once."""

    def __init__(self, method: Differences, student: Student) -> None:
        self.method, self.student = method, student
        self.flat = FlatParameters(student.parameters)
        self.shared = self.flat.parameters()
        self.coder = Coder(method.scheme, self.flat.shape, ReplicaTally())
        self.owed: Tensor | None = None
        self.momentum: Tensor | None = None
        self.sent = self.shared

    def trained(self, own: Tensor) -> Tensor:
        return own if self.owed is None else own + self.owed

    def send(self) -> CodedMessage:
        self.sent = self.flat.parameters()
        difference = self.trained(self.sent) - self.shared
        if self.method.visible is not None:
            low = getattr(torch, self.method.visible)
            left = (self.shared + difference).to(low) == self.shared.to(low)
            self.owed, difference = difference * left, difference.masked_fill(left, 0.0)
        elif not self.method.keep:
            self.owed = None
        message = self.coder.encode(difference)
        assert message is not None
        return message

    def land(self, rank: int, messages: list[CodedMessage]) -> None:
        packets = {r: m.packets for r, m in enumerate(messages) if r != rank}
        mean, mu = self.coder.mean(Arrived(rank, messages[rank].coded, packets)), self.method.momentum
        if mu:
            self.momentum = mean.clone() if self.momentum is None else self.momentum * mu + mean
            mean = mean + mu * self.momentum
        step = self.method.rate * mean
        self.shared = self.shared + step
        own = self.flat.parameters()
        if self.method.keep:
            onward = self.trained(own) + (step - self.coder.of(messages[rank].coded))
            self.put(onward, onward)
        else:
            onward = self.shared + (own - self.sent)
            if self.method.alpha is not None:
                onward = torch.lerp(self.shared, own, self.method.alpha)
            self.put(onward, self.trained(onward))

    def put(self, values: Tensor, onward: Tensor) -> None:
        self.flat.put_parameters(values)
        exact = onward is values and self.flat.is_exact
        self.owed = None if exact else onward - self.flat.parameters()


def in_blocks(method: Differences, mixed: bool, rank: int, office: PostOffice) -> list[list[Tensor]]:
    """Train as ``by_rules`` does; return the parameters behind each step, and all that is saved."""
    student, seen = Student(rank, mixed), []
    synchroniser = synchroniser_of(method, student.parameters, office.network(rank))
    assert isinstance(synchroniser, LocalSteps)
    for _ in range(STEPS):
        synchroniser.step(student.step)
        seen.append([p.clone() for p in student.parameters.values()])
    synchroniser.gather()
    state = synchroniser.state_dict()
    return [*seen, [state[k] for k in sorted(state) if k.startswith(("0.shared", "0.owed", "0.momentum"))]]


def by_rules(method: Differences, mixed: bool) -> list[list[list[Tensor]]]:
    """Train replicas that exchange behind every so many steps, so many later, and all at the end."""
    replicas = [Whole(method, Student(rank, mixed)) for rank in range(RANKS)]
    seen = [list[list[Tensor]]() for _ in replicas]
    messages: list[CodedMessage] = []

    def land() -> None:
        for rank, one in enumerate(replicas if messages else []):
            one.land(rank, messages)
        messages.clear()

    for step in range(1, STEPS + 1):
        for one in replicas:
            one.student.step()
        if step > method.late and (step - method.late) % method.every == 0 and messages:
            land()
        if step % method.every == 0:
            messages += [one.send() for one in replicas]
            if not method.late:
                land()
        for one, found in zip(replicas, seen, strict=True):
            found.append([p.clone() for p in one.student.parameters.values()])
    land()
    if STEPS % method.every:
        messages += [one.send() for one in replicas]
        land()
    for one, found in zip(replicas, seen, strict=True):
        one.put(one.shared, one.trained(one.flat.parameters()))
        kept = {"momentum.": one.momentum, "owed.": one.owed, "shared.": one.shared}
        state = {
            k: x for name, x in kept.items() if x is not None for k, x in one.flat.named(x, name).items()
        }
        found.append([state[k] for k in sorted(state)])
    return seen


@pytest.mark.parametrize(("name", "mixed"), [*((name, True) for name in RULES), *EXACT])
def test_blocks_one_after_another_come_to_the_bits_of_all_values_at_once(
    name: str, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coder, "BLOCK", 1 << 13)  # three blocks, with several parameters in one
    method, office = REPLICAS.parse(name).schemes[EXCHANGE], PostOffice(RANKS)
    assert isinstance(method, Differences)
    expected = by_rules(method, mixed)
    for own, other in zip(
        on_each(RANKS, lambda r: in_blocks(method, mixed, r, office)), expected, strict=True
    ):
        for here, there in zip(own, other, strict=True):
            assert all(map(torch.equal, here, there)) and len(here) == len(there)


class Echo:
    """The other of two replicas: it sends what this one did."""

    capacity, rank, ranks = None, 0, (0, 1)
    sent: ClassVar[dict[int, bytes]] = {}

    def post(self, step: int, payload: bytes) -> int:
        self.sent[step] = payload
        return len(payload)

    def collect(self, step: int, deadline: float) -> dict[int, bytes]:
        return {1: self.sent[step]}


@pytest.mark.parametrize("name", COPIES)
def test_an_exchange_takes_two_copies_beside_the_model_and_one_more_for_an_outer_momentum(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coder, "BLOCK", 1 << 16)  # of 2**20 values
    method = REPLICAS.parse(name).schemes[EXCHANGE]
    noise = torch.randn(1024, generator=torch.Generator().manual_seed(7)) * 1e-3
    for dtype in (torch.float32, torch.bfloat16):
        parameters = {f"{k}": torch.zeros(128, 1024, dtype=dtype) for k in range(8)}

        network = Network(lambda _: Echo(), lambda _: pytest.fail("nothing is summed"))
        with LiveTensors(list(parameters.values())) as live:
            synchroniser = synchroniser_of(method, parameters, network)
            assert isinstance(synchroniser, LocalSteps)
            for k in range(7):
                synchroniser.step(partial(torch._foreach_add_, list(parameters.values()), [noise] * 8))
                if k == 3:
                    synchroniser.gather()
        copies = (live.peak - max(map(len, Echo.sent.values()))) / (4 << 20)
        assert COPIES[name] - 1 < copies < COPIES[name] + ROOM, (dtype, copies)
