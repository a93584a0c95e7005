"""Before the first step: what a first pass does slowly is done once, on nothing, and changes nothing.

Memory comes from the kernel page by page, libraries choose their loops and start their threads. In a first
step that costs as much as half a step, and a policy that times it plans by the wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.runs.data.task import Task, next_token_loss
from thinwire.runs.machine.compute import ON_CPU, Compute
from thinwire.seeding import seeded
from thinwire.uses.training.pipeline.choosing.replay import operations
from thinwire.uses.training.pipeline.recipes import PipelineRecipe
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.stepper import StagePart


def warm_up(
    parts: Mapping[int, StagePart],
    optimiser: torch.optim.Optimizer,
    config: TrainConfig,
    task: Task,
    recipe: PipelineRecipe,
    working: Callable[[], None] = lambda: None,
    compute: Compute = ON_CPU,
) -> None:
    """Pass a step's micro-batches through this rank's parts, and a step of size 0 through the optimiser.

    As many as the schedule has under way at once are held, so that the memory for their activations is there.
    Weights, gradients, the optimiser's state and the generator of random numbers are as before; an optimiser
    that has a state already, of a run resumed, is left alone.
    ``working`` is called after each micro-batch, which others may be waiting behind.
    """
    with seeded():
        if not optimiser.state:
            _touch(optimiser)
        # After what stays, so that its memory is what the steps find.
        _pass(parts, config, task, working, compute)
        optimiser.zero_grad(set_to_none=True)
        hidden = torch.randn(config.rows, *task.hidden, dtype=compute.crossing, device=compute.device)
        for scheme in recipe.schemes.values() if config.stages > 1 else ():
            _code(scheme, hidden)


def _pass(
    parts: Mapping[int, StagePart],
    config: TrainConfig,
    task: Task,
    working: Callable[[], None],
    compute: Compute,
) -> None:
    ranks = sorted({index % config.processes for index in parts})
    stages = [stage for rank in ranks for stage in _held(config, rank)]
    ahead = []
    for stage in stages[1:]:
        ahead.append(_forward(parts[stage], stage, config, task, compute))
        working()
    for index, part in parts.items():
        for _ in range(max(2, config.microbatches)):  # as in a step: where memory lies depends on the order
            _back(_forward(part, index, config, task, compute))
            working()
    del ahead  # held until here


def _back(y: Tensor) -> None:
    y.backward(torch.zeros_like(y))


def _held(config: TrainConfig, rank: int) -> list[int]:
    """Return the stages whose activations a rank holds when it holds most, once for each micro-batch."""
    held, most = list[int](), list[int]()
    for stage, back, _ in operations(config.schedule, rank, config.stages, config.microbatches):
        if back:
            held.remove(stage)
        else:
            held.append(stage)
        most = max(most, list(held), key=len)
    return most


def _forward(part: StagePart, index: int, config: TrainConfig, task: Task, compute: Compute) -> Tensor:
    rows = config.rows
    block = task.blank(rows).to(compute.device)
    hidden = torch.zeros(rows, *task.hidden, dtype=compute.crossing, device=compute.device)
    x = task.inputs(block) if index == 0 else hidden.requires_grad_()
    part.on_samples(range(rows))
    y: Tensor = part.module(x)
    part.on_samples(())
    return next_token_loss(y, task.targets(block)) if index == config.stages - 1 else y


def _touch(optimiser: torch.optim.Optimizer) -> None:
    """Let the optimiser make its state: zeros, as it begins with."""
    rates = [group["lr"] for group in optimiser.param_groups]
    for group in optimiser.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimiser.step()
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimiser.state.values():
        for value in state.values():
            value.zero_()  # steps, from which corrections count; SGD's weight decay in the momentum
    optimiser.zero_grad(set_to_none=True)


def _code(scheme: Scheme, x: Tensor) -> None:
    """Send a tensor twice, as a first visit and as a later one, to nobody."""
    sender, receiver = Sender(scheme), Receiver()
    for _ in range(2):
        packet, _ = sender.encode(x, range(len(x)))
        receiver.decode(wire.unpack(wire.pack(packet)), device=x.device)
