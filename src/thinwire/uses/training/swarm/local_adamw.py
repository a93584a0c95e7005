"""A member's local steps by AdamW, and the moments that it keeps from round to round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.rounds.local_training import Loss, take_steps
from thinwire.spec import Spec
from thinwire.types import InputError, require

KEPT, ANEW = "kept", "anew"


@dataclass(frozen=True, repr=False)
class LocalAdamW(Spec):
    """AdamW; ``clip`` bounds the gradient's norm (0: not at all).

    ``moments``: ``kept`` goes on from those of the member's last round, ``anew`` begins each round without.
    The step size comes with each round; the first ``warmup`` steps after moments began are smaller, as one
    gradient says little of how large the next ones are. Source: AdamW (arXiv 1711.05101).
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0
    moments: str = KEPT
    warmup: int = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, InputError, f"{name}={value} is not from 0 to below 1; give such a share")
        for name in ("weight_decay", "clip", "warmup"):
            value = getattr(self, name)
            require(value >= 0, InputError, f"{name}={value} is below 0; give 0 or more")
        require(self.eps > 0, InputError, f"eps={self.eps} is not above 0; 1e-8 is usual")
        known = self.moments in (KEPT, ANEW)
        require(known, InputError, f"moments={self.moments!r} is not one of {KEPT}, {ANEW}")

    def open(self) -> AdamWTurns:
        """Return the owner of one member's moments, which has none yet."""
        return AdamWTurns(self)


class AdamWTurns:
    """Train in turns by ``spec``, as ``LocalTraining``; the moments between them are here.

    They are on the devices of the parameters. A turn that fails leaves none: its own may not be finite.

    >>> turns = LocalAdamW().open()
    >>> net = nn.Linear(2, 1)
    >>> turns.run(net, lambda model, x: model(x).sum(), [torch.ones(1, 2)] * 3, rate=0.1, who="member 0")
    >>> turns.state_dict()["steps"]
    tensor([3, 3])
    """

    def __init__(self, spec: LocalAdamW) -> None:
        self.spec = spec
        self._steps: list[int] = []  # that the moments are of, by parameter
        self._first: list[Tensor] = []
        self._second: list[Tensor] = []

    def run(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Iterable[Any],
        rate: float,
        who: str,
        loss_scale: float = 1.0,
    ) -> None:
        """Take a step at the step size ``rate`` for each batch.

        Errors: as of ``take_steps``; ``InputError`` where the moments are those of another model.
        """
        self._begin([p for p in model.parameters() if p.requires_grad])

        def move(parameters: list[nn.Parameter]) -> None:
            self._move(parameters, rate)

        try:
            take_steps(model, loss, batches, move, rate, who, self.spec.clip, loss_scale)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Begin without moments at the next turn."""
        self._steps, self._first, self._second = [], [], []

    def _begin(self, parameters: list[nn.Parameter]) -> None:
        if self.spec.moments == ANEW or not self._steps:
            self._steps = [0] * len(parameters)
            self._first, self._second = (
                [torch.zeros_like(p, memory_format=torch.preserve_format) for p in parameters]
                for _ in range(2)
            )
        here, kept = [p.shape for p in parameters], [m.shape for m in self._first]
        wrong = f"moments of {len(kept)} parameters for a model with {len(here)}, or of other shapes"
        require(here == kept, InputError, f"{wrong}; give those of this model, or none")
        for moments in (self._first, self._second):
            moments[:] = [m.to(p.device) for m, p in zip(moments, parameters, strict=True)]

    def _move(self, parameters: list[nn.Parameter], rate: float) -> None:
        """Do what ``torch.optim.AdamW`` does, which would import a compiler first: seconds, and 100 MB."""
        slopes = {i: p.grad for i, p in enumerate(parameters) if p.grad is not None}
        if not slopes:
            return
        for i in slopes:
            self._steps[i] += 1
        values, first, second = (
            [each[i] for i in slopes] for each in (parameters, self._first, self._second)
        )
        grads, steps, spec = list(slopes.values()), [self._steps[i] for i in slopes], self.spec
        rate *= min(1.0, max(steps) / (1 + spec.warmup))
        torch._foreach_mul_(values, 1 - rate * spec.weight_decay)
        torch._foreach_lerp_(first, grads, 1 - spec.beta1)
        torch._foreach_mul_(second, spec.beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - spec.beta2)
        sizes = torch._foreach_sqrt(second)
        torch._foreach_div_(sizes, [math.sqrt(1 - spec.beta2**n) for n in steps])
        torch._foreach_add_(sizes, spec.eps)
        torch._foreach_addcdiv_(values, first, sizes, [-rate / (1 - spec.beta1**n) for n in steps])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the moments as plain tensors, on the CPU."""
        kept = {"first": self._first, "second": self._second}
        state = {
            f"{name}.{i}": m.to("cpu", copy=True) for name, each in kept.items() for i, m in enumerate(each)
        }
        return state | {"steps": torch.tensor(self._steps, dtype=torch.int64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``state_dict`` returned."""
        self._steps = state["steps"].tolist()
        self._first, self._second = (
            [state[f"{name}.{i}"].clone() for i in range(len(self._steps))] for name in ("first", "second")
        )
