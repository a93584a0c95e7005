"""Before the first step: what a first pass does slowly is done once, on nothing, and changes nothing.

Memory comes from the kernel page by page, libraries choose their loops and start their threads. In a first
step that costs as much as half a step, and a policy that times it plans by the wrong numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire import wire
from thinwire.channel import Receiver, Scheme, Sender
from thinwire.lab.config import TrainConfig
from thinwire.lab.loss import next_token_loss
from thinwire.lab.setup import Part
from thinwire.recipes import Recipe


def warm_up(
    parts: Mapping[int, Part],
    optimiser: torch.optim.Optimizer,
    config: TrainConfig,
    width: int,
    recipe: Recipe,
) -> None:
    """Pass one micro-batch through this rank's parts and back, and a step of size 0 through the optimiser.

    ``width``: channels of a hidden state. Weights, gradients, the optimiser's state and the generator of
    random numbers are as before; an optimiser that has a state already, of a run resumed, is left alone.
    """
    rows = config.batch // config.microbatches
    with torch.random.fork_rng(devices=[]):
        for index, part in parts.items():
            part.on_samples(range(rows))
            _pass(part, index, config, width, rows)
            part.on_samples(())
        if not optimiser.state:
            _touch(optimiser)
        optimiser.zero_grad(set_to_none=True)
        for scheme in (recipe.forward, recipe.backward):
            _code(scheme, torch.randn(rows, config.seq, width))


def _pass(part: Part, index: int, config: TrainConfig, width: int, rows: int) -> None:
    tokens = torch.zeros(rows, config.seq, dtype=torch.int64)
    x = tokens if index == 0 else torch.zeros(rows, config.seq, width, requires_grad=True)
    y: Tensor = part.module(x)
    if index == config.stages - 1:
        y = next_token_loss(y, tokens)
    y.backward(torch.zeros_like(y))


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
        state["step"].zero_()  # the corrections for the first steps count from there


def _code(scheme: Scheme, x: Tensor) -> None:
    """Send a tensor twice, as a first visit and as a later one, to nobody."""
    sender, receiver = Sender(scheme), Receiver()
    for _ in range(2):
        packet, _ = sender.encode(x, range(len(x)))
        receiver.decode(wire.unpack(wire.pack(packet)))
