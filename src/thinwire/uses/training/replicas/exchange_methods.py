"""What replicas exchange, and when: values that a recipe stands for."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.channels.channel import Scheme
from thinwire.channels.memory import NoMemory
from thinwire.codecs import ChunkTopK, Codec, Uniform
from thinwire.spec import Spec
from thinwire.types import InputError, require

MAX_STALENESS = 64  # steps
MAX_LOCAL_STEPS = 1 << 15
FORMS = ("float32", "bfloat16")


@dataclass(frozen=True, repr=False)
class AllReduce(Spec):
    """Average the gradients of each step as they are, in ``dtype``: what every other method is set against.

    Each replica sums a part for all: it sends and receives 2 (N - 1) / N of the gradient.
    """

    dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dtype in FORMS, InputError, f"dtype={self.dtype!r} is not one of {', '.join(FORMS)}")


@dataclass(frozen=True, repr=False)
class Gradients(Spec):
    """Send the coded gradient of each step to every other replica, and apply it ``staleness`` steps later.

    While the delay line fills, nothing is applied. The first ``exact`` steps are exchanged as they are, of
    which a DDP hook has two at least.
    Source: DD-EF-SGD, the base of DeCo-SGD (arXiv 2507.17346) [second-hand]: delayed aggregation of
    gradients coded under error feedback.
    """

    scheme: Scheme = field(default_factory=Scheme)
    staleness: int = 0
    exact: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_memory(self.scheme)
        _within("staleness", self.staleness, 0, MAX_STALENESS)
        _within("exact", self.exact, 0, MAX_LOCAL_STEPS)


@dataclass(frozen=True, repr=False)
class Differences(Spec):
    """Train alone for ``every`` steps, then send the coded difference of the parameters to the shared ones.

    - ``late``: steps that pass, with the exchange under way, before its result is applied; at most ``every``;
    - ``rate``, ``momentum``: of the outer optimiser, SGD with Nesterov's momentum, on the mean difference;
    - ``alpha``: share of a replica's own parameters in what it goes on with, where a result is late. Without
      it, a replica goes on from the shared parameters plus its own steps since it sent;
    - ``keep``: a replica keeps what it could not send in its own parameters, instead of in error feedback;
    - ``visible``: only what changes the shared parameters in this dtype is sent of a difference, and the rest
      is added to the next one;
    - ``fragments``: parts of the parameters that are exchanged in turn, ``every / fragments`` steps apart.

    Source: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512), SparseLoCo (arXiv 2508.15706).
    ``visible`` as PULSELoCo (arXiv 2602.03839). The rule without ``alpha`` is ours.
    """

    scheme: Scheme = field(default_factory=Scheme)
    every: int = 10
    late: int = 0
    rate: float = 1.0
    momentum: float = 0.0
    alpha: float | None = None
    keep: bool = False
    visible: str | None = None
    fragments: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_memory(self.scheme)
        _within("every", self.every, 1, MAX_LOCAL_STEPS)
        _within("late", self.late, 0, self.every)
        _within("rate", self.rate, 0, 10)
        _within("momentum", self.momentum, 0, 1)
        _within("alpha", self.alpha or 0, 0, 1)
        alone = not self.keep or (self.alpha is None and isinstance(self.scheme.memory, NoMemory))
        require(alone, InputError, "keep=True goes with NoMemory and without alpha; drop one of them")
        text = f"visible={self.visible!r} is not bfloat16 or float16, without keep and alpha"
        low = self.visible in ("bfloat16", "float16") and not self.keep and self.alpha is None
        require(self.visible is None or low, InputError, text)
        _within("fragments", self.fragments, 1, self.every)


Method = AllReduce | Gradients | Differences


def largest(ratio: float) -> Codec:
    """Return the codec of the largest values of a gradient: 8 bits each, a scale for 64.

    >>> largest(0.01)
    ChunkTopK(ratio=0.01, values=Uniform(bits=8, group=64))
    """
    return ChunkTopK(ratio, values=Uniform(8, group=64))


def _check_memory(scheme: Scheme) -> None:
    text = f"{scheme.memory!r} keeps references at all ends, which replicas have none of"
    require(not scheme.memory.mirrored, InputError, f"{text}; take NoMemory() or ErrorFeedback()")


def _within(name: str, value: float, low: float, high: float) -> None:
    require(low <= value <= high, InputError, f"{name}={value} is not in {low:g}..{high:g}")
