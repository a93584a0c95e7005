"""A client's local steps: plain SGD from the weights of a version, on batches of its own data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinwire.spec import Spec
from thinwire.types import InputError, ThinwireError, require

_CPU = torch.device("cpu")
Loss = Callable[[nn.Module, Any], Tensor]  # of one batch, a scalar


class TrainingError(ThinwireError):
    """A client's training raised or diverged. The text names client and step."""


def classification(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a batch of inputs and classes."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


class LocalTraining(Protocol):
    """How a client trains in one turn."""

    def run(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Iterable[Any],
        rate: float,
        who: str,
        loss_scale: float = 1.0,
    ) -> None:
        """Take a step at the step size ``rate`` for each batch. Errors: as of ``take_steps``."""
        ...


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

    def run(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Iterable[Any],
        rate: float,
        who: str,
        loss_scale: float = 1.0,
    ) -> None:
        """Take a step at the step size ``rate`` for each batch, as ``take_steps`` does."""
        speeds: dict[int, Tensor] = {}  # of parameters, by their place

        def move(parameters: list[nn.Parameter]) -> None:
            self._move(parameters, speeds, rate)

        take_steps(model, loss, batches, move, rate, who, self.clip, loss_scale)

    def _move(self, parameters: list[nn.Parameter], speeds: dict[int, Tensor], rate: float) -> None:
        """Do what ``torch.optim.SGD`` does, which would import a compiler first: seconds, and 100 MB."""
        for i, p in enumerate(parameters):
            if p.grad is None:
                continue
            move = p.grad.add(p, alpha=self.weight_decay) if self.weight_decay else p.grad
            if self.momentum:
                speeds[i] = speeds[i].mul_(self.momentum).add_(move) if i in speeds else move.clone()
                move = speeds[i]
            p.add_(move, alpha=-rate)


def take_steps(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    move: Callable[[list[nn.Parameter]], object],
    rate: float,
    who: str,
    clip: float = 0.0,
    loss_scale: float = 1.0,
) -> None:
    """Have ``move`` take a step with the trained parameters for each batch, brought to the model's device.

    ``clip`` bounds the gradient's norm (0: not at all). ``loss_scale``: the loss is multiplied by it for the
    gradients, and they are divided by it: float16 would round small ones to zero.
    Errors: ``TrainingError`` naming ``who`` and the step, at the first loss that is no finite number, or
    with whatever ``loss`` raised as its cause. On a card losses are looked at once all steps are done.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device if parameters else _CPU
    model.train()
    step, losses, norm = 0, list[Tensor](), None
    try:
        for step, batch in enumerate(batches, 1):
            for p in parameters:
                p.grad = None
            found = loss(model, placed(batch, device))
            losses.append(found.detach())
            if device.type == "cpu":
                _look_at(losses, who, step, rate)
            (found * loss_scale if loss_scale != 1 else found).backward()
            if loss_scale != 1:
                torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1 / loss_scale)
            if clip:
                norm = nn.utils.clip_grad_norm_(parameters, clip)
            with torch.no_grad():
                move(parameters)
        _look_at(losses, who, step, rate)
        if norm is not None:  # an earlier one that is not finite shows in the next loss
            check_finite(float(norm), who, step, rate)
    except ThinwireError:
        raise
    except Exception as e:
        text = f"{type(e).__name__}: {e}".rstrip(": ")
        raise TrainingError(f"{who}: training raised {text} at local step {max(step, 1)}") from e


def placed(batch: Any, device: torch.device) -> Any:
    """Return a batch, a tensor or tensors in tuples, lists and dicts, on a device; anything else as it is.

    >>> placed([torch.ones(1), "text"], torch.device("meta"))
    [tensor(..., device='meta', size=(1,)), 'text']
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: placed(value, device) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(placed(value, device) for value in batch)
    return batch


def _look_at(losses: list[Tensor], who: str, step: int, rate: float) -> None:
    """Check the losses of the last steps, up to ``step``, and forget them: one wait for a card."""
    first = step - len(losses) + 1
    for number, value in enumerate(torch.stack(losses).tolist() if losses else (), first):
        check_finite(value, who, number, rate)
    losses.clear()


def check_finite(value: float, who: str, step: int, rate: float) -> None:
    """Raise ``TrainingError`` unless ``value``, a loss or a sum, is a finite number."""
    wrong = f"{who}: training diverged at local step {step}: {value} is not finite; lower the rate {rate:g}"
    require(math.isfinite(value), TrainingError, wrong)


class Data(Protocol):
    """What a client trains on."""

    @property
    def samples(self) -> int:
        """How many samples there are."""
        ...

    def batches(self, steps: int, draw: torch.Generator) -> Iterator[Any]:
        """Yield ``steps`` batches; all that is random comes from ``draw``."""
        ...


def as_they_are(inputs: Tensor) -> Tensor:
    """Return ``inputs``."""
    return inputs


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and labels, [n, ...] each, drawn in a new order at each turn, ``batch`` at a time (0: all).

    Each pass takes every sample once; where fewer are left than a batch takes, the next pass begins. Many
    clients may share the tensors: ``rows`` [m] int64 says which samples are this one's (None: all).
    ``prepare`` makes of a batch of inputs what the model takes, so that bytes need not be kept as floats.

    >>> data = Samples(torch.arange(5.0)[:, None], torch.zeros(5), batch=2)
    >>> [len(labels) for _, labels in data.batches(3, torch.Generator())]
    [2, 2, 2]
    """

    inputs: Tensor
    labels: Tensor
    batch: int = 20
    rows: Tensor | None = None
    prepare: Callable[[Tensor], Tensor] = as_they_are

    def __post_init__(self) -> None:
        n, many = len(self.inputs), len(self.labels)
        fits = n == many and self.samples > 0
        require(fits, InputError, f"{n} inputs for {many} labels; give as many, one at least")
        require(self.batch >= 0, InputError, f"batch={self.batch} is below 0; give samples, or 0 for all")

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return len(self.labels if self.rows is None else self.rows)

    def batches(self, steps: int, draw: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``steps`` batches of inputs and labels."""
        size = min(self.batch or self.samples, self.samples)
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            if len(order) < size:
                order = torch.randperm(self.samples, generator=draw)
            taken, order = order[:size], order[size:]
            rows = taken if self.rows is None else self.rows[taken]
            yield self.prepare(self.inputs[rows]), self.labels[rows]


class Rates(Protocol):
    """The step size of local steps by version, as a value."""

    @property
    def first(self) -> float:
        """The one that others follow from."""
        ...

    @property
    def last(self) -> float:
        """The one at the end that is planned."""
        ...

    def at(self, version: int) -> float:
        """Return the step size of the local steps that start from ``version``."""
        ...


@dataclass(frozen=True, repr=False)
class Decay(Spec):
    """Take ``first / (1 + decay * version)``; ``horizon`` is the last version that is planned for.

    >>> Decay(0.1, decay=0.5).at(2)
    0.05
    """

    first: float = 0.1
    decay: float = 0.0
    horizon: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.first > 0, InputError, f"first={self.first} is no step size; give one above 0")
        for name in ("decay", "horizon"):
            value = getattr(self, name)
            require(value >= 0, InputError, f"{name}={value} is below 0; give 0 or more")

    def at(self, version: int) -> float:
        """Return the step size of the local steps that start from ``version``."""
        return self.first / (1 + self.decay * version)

    @property
    def last(self) -> float:
        """The step size at the horizon."""
        return self.at(self.horizon)
