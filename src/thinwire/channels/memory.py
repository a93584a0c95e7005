"""Memories: what the two ends of a channel remember between messages, as pure functions.

``s`` is the state kept for one key, or ``None`` before the first message. Batched: row i of every argument
belongs to key i, except under a *shared* memory, whose single state serves all rows.

A *mirrored* memory holds equal state at both ends, so its first message of a key is a keyframe, and its
functions use no arithmetic that a fused multiply-add or another order of summation could round differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire import spec
from thinwire.spec import Spec
from thinwire.types import InputError, require

KEYS = ("sample", "step")


@runtime_checkable
class Memory(Protocol):
    """The pure functions, and how their state is kept."""

    @property
    def mirrored(self) -> bool:
        """Whether both ends hold equal state."""
        ...

    @property
    def shared(self) -> bool:
        """Whether one state serves every row."""
        ...

    @property
    def key(self) -> str:
        """What a state belongs to: a ``sample``, or a position within the ``step``."""
        ...

    def residual(self, x: Tensor, s: Tensor | None) -> Tensor:
        """Return what is worth encoding, given the state."""
        ...

    def restore(self, y_hat: Tensor, s: Tensor | None) -> Tensor:
        """Return what the receiver outputs for the decoded residual."""
        ...

    def advance(self, x_hat: Tensor, s: Tensor | None, y: Tensor | None = None) -> Tensor | None:
        """Return the next state, from what ``restore`` returned; a sender knows ``y``, the true residual."""
        ...

    def state_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of one key's state [1, ...], for tensors of ``shape``; None where none is kept."""
        ...


class _ByKey(Spec):
    """A memory with a state for each key; unless it says otherwise, values pass it unchanged."""

    mirrored = True
    shared = False
    key: str
    _kept = "states are"

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.key in KEYS
        require(good, InputError, f"{self._kept} keyed by {' or '.join(KEYS)}, not {self.key!r}")

    def residual(self, x: Tensor, s: Tensor | None) -> Tensor:
        return x

    def restore(self, y_hat: Tensor, s: Tensor | None) -> Tensor:
        return y_hat

    def state_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return (1, *shape[1:])


@dataclass(frozen=True, repr=False)
class NoMemory(_ByKey):
    """Remember nothing: every message stands alone."""

    mirrored = False
    key = "sample"

    def advance(self, x_hat: Tensor, s: Tensor | None, y: Tensor | None = None) -> Tensor | None:
        return None

    def state_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return None


@dataclass(frozen=True, repr=False)
class Delta(_ByKey):
    """Send the difference to the reference both ends hold for this sample, or this place in the step.

    The reference moves by the decoded residual, so errors never accumulate: what a visit dropped is part of
    the next visit's residual. Source: AQ-SGD (arXiv 2206.01299, its delta by sample); ``key="step"`` is the
    difference to the step before, which pays only where consecutive steps see the same data.

    >>> Delta(key="step")
    Delta(key='step')
    """

    key: str = "sample"
    _kept = "a delta is"

    def predicted(self, s: Tensor) -> Tensor:
        """Return what the next values are expected to be: the last ones."""
        return s

    def residual(self, x: Tensor, s: Tensor | None) -> Tensor:
        return x if s is None else x - s

    def restore(self, y_hat: Tensor, s: Tensor | None) -> Tensor:
        return y_hat if s is None else s + y_hat

    def advance(self, x_hat: Tensor, s: Tensor | None, y: Tensor | None = None) -> Tensor | None:
        return x_hat


@dataclass(frozen=True, repr=False)
class SecondOrderDelta(_ByKey):
    """Delta that also extrapolates the last movement, times ``decay``.

    At 1 to 3 bits a decay near 1 feeds quantisation noise back and diverges: the decay is a stability
    condition, which is why plain ``Delta`` is the default everywhere. State: [2, *shape].
    """

    decay: float = 0.5
    key: str = "sample"
    _kept = "a delta is"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.decay <= 1, InputError, f"decay {self.decay} is not between 0 and 1")

    def predicted(self, s: Tensor) -> Tensor:
        """Return what the next values would be if they went on moving."""
        return s[:, 0] + s[:, 1]

    def residual(self, x: Tensor, s: Tensor | None) -> Tensor:
        return x if s is None else x - self.predicted(s)

    def restore(self, y_hat: Tensor, s: Tensor | None) -> Tensor:
        return y_hat if s is None else self.predicted(s) + y_hat

    def advance(self, x_hat: Tensor, s: Tensor | None, y: Tensor | None = None) -> Tensor | None:
        state = x_hat.new_empty(len(x_hat), 2, *x_hat.shape[1:])
        state[:, 0] = x_hat
        if s is None:
            state[:, 1] = 0
        else:
            torch.sub(x_hat, s[:, 0], out=state[:, 1]).mul_(self.decay)
        return state

    def state_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return (1, 2, *shape[1:])


@dataclass(frozen=True, repr=False)
class RunningMean(Spec):
    """Subtract a running mean per channel: what consecutive, different batches really have in common.

    Against the difference of two such batches it halves the energy of the residual, at no state per sample.
    The mean moves by 2^-shift of its distance to each frame's, a power of two so that no rounding depends on
    fused arithmetic; the frame's mean is summed in fixed point so that no order of summation matters.
    State: [channels].
    """

    shift: int = 2
    mirrored = True
    shared = True
    key = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.shift <= 16, InputError, f"shift {self.shift} is not between 0 and 16")

    def residual(self, x: Tensor, s: Tensor | None) -> Tensor:
        return x if s is None else x - s

    def restore(self, y_hat: Tensor, s: Tensor | None) -> Tensor:
        return y_hat if s is None else s + y_hat

    def advance(self, x_hat: Tensor, s: Tensor | None, y: Tensor | None = None) -> Tensor | None:
        mean = exact_mean(x_hat)
        return mean if s is None else s + (mean - s) * 2.0**-self.shift

    def state_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return (1, shape[-1])


@dataclass(frozen=True, repr=False)
class ErrorFeedback(_ByKey):
    """Add ``decay`` times what the codec dropped so far to the next message; the receiver holds nothing.

    Source: error feedback as in 1-bit SGD (Seide et al., 2014) and EF-SGD (arXiv 1901.09847); with a decay
    below 1 as in SparseLoCo (arXiv 2508.15706) [second-hand].
    """

    key: str = "sample"
    decay: float = 1.0
    mirrored = False
    _kept = "errors are"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.decay <= 1, InputError, f"decay {self.decay} is not between 0 and 1")

    def residual(self, x: Tensor, s: Tensor | None) -> Tensor:
        return x if s is None else torch.add(x, s, alpha=self.decay)

    def advance(self, x_hat: Tensor, s: Tensor | None, y: Tensor | None = None) -> Tensor | None:
        return None if y is None else y - x_hat


@dataclass(frozen=True, repr=False)
class FirstVisit(_ByKey):
    """Remember only that a key was seen: its first message takes the keyframe codec, the rest stand alone."""

    key: str = "sample"
    _kept = "visits are"

    def advance(self, x_hat: Tensor, s: Tensor | None, y: Tensor | None = None) -> Tensor | None:
        return x_hat.new_zeros(len(x_hat), 0)

    def state_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return (1, 0)


def exact_mean(x: Tensor) -> Tensor:
    """Return the mean over all but the last dimension, the same bits for every order of summation.

    In multiples of 2**-12: what is below half of that counts as zero. For n values a channel, n rounded up to
    a power of two, magnitudes above 2**50 / n count as that much, and a NaN as zero.
    """
    rows = math.prod(x.shape[:-1])  # without channels nothing else tells how many
    scaled = (x.reshape(rows, x.shape[-1]) * 4096.0).round()
    top = 2.0 ** (62 - (max(1, len(scaled)) - 1).bit_length())  # so that no sum overflows
    fixed = scaled.nan_to_num_(0.0, top, -top).clamp_(-top, top).to(torch.int64)
    return (fixed.sum(0).to(torch.float64) / (4096.0 * max(1, len(fixed)))).to(torch.float32)


REGISTRY: dict[str, type] = {
    c.__name__: c for c in (NoMemory, Delta, SecondOrderDelta, RunningMean, ErrorFeedback, FirstVisit)
}


def parse_memory(text: str) -> Memory:
    """Return the memory that a spec such as ``Delta(key='step')`` describes; ``PayloadError`` otherwise."""
    return _parsed(text, tuple(REGISTRY.values()))  # one that was registered anew is another


@lru_cache(maxsize=64)
def _parsed(text: str, known: tuple[type, ...]) -> Memory:
    memory: Memory = spec.parse(text, REGISTRY, Memory, "a memory")
    return memory
