"""The optimiser of a run: AdamW, or SGD perhaps with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from thinwire.types import InputError
from thinwire.uses.training.run.fields import TrainFields, learning_rate


def sgd_momentum(optimizer: str) -> float | None:
    """Return the momentum of ``sgd[:momentum=M]``, and None for ``adamw``; ``InputError`` for anything else.

    >>> sgd_momentum("sgd"), sgd_momentum("sgd:momentum=0.9"), sgd_momentum("adamw")
    (0.0, 0.9, None)
    """
    if optimizer == "adamw":
        return None
    if optimizer == "sgd":
        return 0.0
    if optimizer.startswith("sgd:momentum="):
        with suppress(ValueError):
            if 0 <= (momentum := float(optimizer.partition("=")[2])) < 1:
                return momentum
    raise InputError(
        f"--optimizer {optimizer!r} is unknown; "
        "it can be adamw, sgd, or sgd:momentum=M with M from 0 to below 1"
    )


def make_optimiser(config: TrainFields, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return the optimiser that a configuration asks for, over ``parameters``."""
    rate, decay = learning_rate(config.to_dict()), config.weight_decay
    momentum = sgd_momentum(config.optimizer)
    if momentum is None:
        return torch.optim.AdamW(parameters, rate, weight_decay=decay, fused=True)
    return torch.optim.SGD(parameters, rate, momentum=momentum, weight_decay=decay, fused=True)
