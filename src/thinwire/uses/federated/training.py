"""Local steps: plain SGD from the weights of a version."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.spec import Spec
from thinwire.types import InputError, ThinwireError, require

Loss = Callable[[nn.Module, Any], Tensor]  # of one batch, a scalar


class TrainingError(ThinwireError):
    """A client's training raised or diverged. The text names client and step."""


def classification(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a batch of inputs and classes."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


@dataclass(frozen=True, repr=False)
class LocalSGD(Spec):
    """SGD whose momentum begins anew at each turn; ``clip`` bounds the gradient's norm (0: not at all)."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum < 1, InputError, f"momentum={self.momentum} is not in [0, 1)")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            require(value >= 0, InputError, f"{name}={value} is below 0; give 0 or more")

    def run(self, model: nn.Module, loss: Loss, batches: Iterable[Any], rate: float, who: str) -> None:
        """Take a step at the step size ``rate`` for each batch.

        Errors: ``TrainingError`` naming ``who`` and the step, at the first loss that is no finite number, or
        with whatever ``loss`` raised as its cause.
        """
        parameters = [p for p in model.parameters() if p.requires_grad]
        speeds: dict[int, Tensor] = {}  # of parameters, by their place
        model.train()
        step = 0
        try:
            for step, batch in enumerate(batches, 1):
                for p in parameters:
                    p.grad = None
                found = loss(model, batch)
                check_finite(float(found.detach()), who, step, rate)
                found.backward()
                if self.clip:
                    nn.utils.clip_grad_norm_(parameters, self.clip)
                self._move(parameters, speeds, rate)
        except ThinwireError:
            raise
        except Exception as e:
            found_text = f"{type(e).__name__}: {e}".rstrip(": ")
            raise TrainingError(f"{who}: training raised {found_text} at local step {max(step, 1)}") from e

    def _move(self, parameters: list[nn.Parameter], speeds: dict[int, Tensor], rate: float) -> None:
        """Do what ``torch.optim.SGD`` does, which would import a compiler first: seconds, and 100 MB."""
        with torch.no_grad():
            for i, p in enumerate(parameters):
                if p.grad is None:
                    continue
                move = p.grad.add(p, alpha=self.weight_decay) if self.weight_decay else p.grad
                if self.momentum:
                    speeds[i] = speeds[i].mul_(self.momentum).add_(move) if i in speeds else move.clone()
                    move = speeds[i]
                p.add_(move, alpha=-rate)


def check_finite(value: float, who: str, step: int, rate: float) -> None:
    """Raise ``TrainingError`` unless ``value``, a loss or a sum, is a finite number."""
    wrong = f"{who}: training diverged at local step {step}: {value} is not finite; lower the rate {rate:g}"
    require(math.isfinite(value), TrainingError, wrong)
