"""Warming up touches memory and libraries, and leaves weights, optimiser and random numbers as they were."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

from thinwire.runs.data.task import language
from thinwire.runs.machine.compute import ON_CPU, Compute
from thinwire.runs.models.dropout import SampleDropout, SampleIds
from thinwire.uses.training.pipeline.recipes import PIPELINE, parse_recipe
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.stepper import Autocast, StagePart
from thinwire.uses.training.run.warmup import _held, warm_up

CONFIG = TrainConfig(model="gpt2-lab", batch=4, microbatches=2, seq=8)
WIDTH, WORDS = 16, 32
TASK = language(CONFIG.seq, WIDTH, WORDS)


def parts(compute: Compute = ON_CPU) -> dict[int, StagePart]:
    torch.manual_seed(0)
    ids = SampleIds()
    first = nn.Sequential(nn.Embedding(WORDS, WIDTH), SampleDropout(0.5, "key", ids))
    last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
    modules = [Autocast(part, compute, last) for part, last in ((first, False), (last, True))]
    return {0: StagePart(modules[0], ids.set), 1: StagePart(modules[1], lambda _: None)}


def adamw(found: dict[int, StagePart]) -> torch.optim.AdamW:
    weights = [p for part in found.values() for p in part.module.parameters()]
    return torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1, fused=True)


def step(found: dict[int, StagePart], optimiser: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Take a step on the same samples, and return all weights."""
    found[0].on_samples([3, 5])
    y = found[1].module(found[0].module(torch.arange(16).reshape(2, 8)))
    y.square().mean().backward()
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return [p.detach().clone() for part in found.values() for p in part.module.parameters()]


def sgd(found: dict[int, StagePart]) -> torch.optim.SGD:
    weights = [p for part in found.values() for p in part.module.parameters()]
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True)


@pytest.mark.parametrize("crossing", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", list(PIPELINE.entries))
def test_what_follows_is_the_same_to_the_last_bit(recipe: str, crossing: torch.dtype) -> None:
    compute = Compute(dtype=crossing, crossing=crossing)
    cold, warm = parts(compute), parts(compute)
    plain, touched = adamw(cold), adamw(warm)
    random = torch.get_rng_state()
    warm_up(warm, touched, CONFIG, TASK, parse_recipe(recipe), compute=compute)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for part in warm.values() for p in part.module.parameters())
    assert touched.param_groups[0]["lr"] == 0.1 and len(touched.state) == 5
    for _ in range(3):
        for a, b in zip(step(cold, plain), step(warm, touched), strict=True):
            assert torch.equal(a, b)


def test_the_momentum_of_sgd_begins_at_nothing() -> None:
    """Though weight decay is a part of the gradient, and with it of the momentum."""
    cold, warm = parts(), parts()
    plain, touched = sgd(cold), sgd(warm)
    warm_up(warm, touched, CONFIG, TASK, parse_recipe("fp32"))
    assert len(touched.state) == 5
    for _ in range(3):
        for a, b in zip(step(cold, plain), step(warm, touched), strict=True):
            assert torch.equal(a, b)


def test_a_resumed_optimisers_state_is_left_alone() -> None:
    found = parts()
    optimiser = adamw(found)
    step(found, optimiser)
    before = copy.deepcopy(optimiser.state_dict())
    warm_up(found, optimiser, CONFIG, TASK, parse_recipe("fp32"))
    after = optimiser.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for k, state in before["state"].items():
        assert all(torch.equal(after["state"][k][name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("schedule", "stages", "rank", "held"),
    [
        ("eager1f1b", 2, 0, [0] * 4),
        ("eager1f1b", 2, 1, [1]),
        ("1f1b", 2, 0, [0, 0]),
        ("gpipe", 2, 1, [1] * 4),
        ("interleaved1f1b", 4, 0, [0, 0, 2, 2, 0]),
    ],
)
def test_as_many_micro_batches_are_held_as_in_a_step(
    schedule: str, stages: int, rank: int, held: list[int]
) -> None:
    config = TrainConfig(model="gpt2-lab", batch=4, microbatches=4, schedule=schedule, stages=stages)
    assert _held(config, rank) == held


def test_it_says_that_it_is_at_work() -> None:
    """After each micro-batch that is held besides the one that passes, and each of every part."""
    found, said = parts(), list[int]()
    config = TrainConfig(model="gpt2-lab", batch=4, microbatches=4, seq=8, schedule="gpipe")
    warm_up(found, adamw(found), config, TASK, parse_recipe("fp32"), lambda: said.append(1))
    assert len(said) == 2 * 4 - 1 + 2 * 4


def test_they_are_held_at_once() -> None:
    """The activations of all but one are alive when the last passes."""
    found, alive = parts(), []
    refs: list[weakref.ref[torch.Tensor]] = []

    def forward(module: nn.Module, args: tuple[torch.Tensor], y: torch.Tensor) -> None:
        alive.append(sum(ref() is not None for ref in refs))
        refs.append(weakref.ref(y))

    found[0].module.register_forward_hook(forward)
    config = TrainConfig(model="gpt2-lab", batch=8, microbatches=8, seq=8, schedule="gpipe")
    warm_up(found, adamw(found), config, TASK, parse_recipe("fp32"))
    assert max(alive) == 7
