"""What a model of diffusers calls once it is hooked: the sessions of the modes, in terms of ours alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

NO_GRADIENTS = "a model over several ranks has no gradients; call it under torch.no_grad()"


@dataclass(frozen=True)
class Given:
    """A call of a model: the name of ``cache_context``, the whole inputs, and what no rank can compute.

    ``check`` raises ``InputError`` for that, and is called once the call is counted, as on the other ranks.
    """

    stream: str | None
    inputs: Mapping[str, Any]
    check: Callable[[], None]


class WholeForward(Protocol):
    """What stands in for the calls of a model that is whole."""

    def run(self, given: Given, compute: Callable[..., Any]) -> Any:
        """Return what the model returns; ``compute()`` lets it, perhaps with some inputs changed."""
        ...

    def fail(self, cause: BaseException) -> None:
        """End the pass with an error."""
        ...

    def reset(self) -> None:
        """Take the next pass as the first of a picture."""
        ...


class ShardedForward(Protocol):
    """What a model that is taken apart calls, in this order in each of its forward passes."""

    def begin(self, given: Given) -> None:
        """Begin a pass."""
        ...

    def cut(self, name: str, x: Tensor, dim: int, of: Sequence[str] = ()) -> Tensor:
        """Return this rank's share; ``of``: names that were cut before, one part of ``x`` for each."""
        ...

    def attend(self, layer: str, attention: Attention, stock: Stock) -> Tensor:
        """Return the attention over the whole sequence of this rank's queries, by ``stock``, the back end."""
        ...

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Return the output of all ranks."""
        ...

    def end(self) -> None:
        """End the pass."""
        ...

    def fail(self, cause: BaseException) -> None:
        """End the pass with an error."""
        ...

    def reset(self) -> None:
        """Take the next pass as the first of a picture."""
        ...


class Attention(NamedTuple):
    """What an attention is over: [B, tokens, heads, channels] each, and a mask [..., tokens of the keys]."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Stock:
    """A back end of diffusers: what it makes of an attention, and how its products are scaled.

    ``parts`` says whether torch's own attention is behind it, so that keys may as well come in parts;
    ``beside``, whether it adds keys that every rank has, such as those of a text that is not split.
    """

    whole: Callable[[Attention], Tensor]
    parts: bool = False
    scale: float | None = None
    beside: bool = False


class ExpertForward(Protocol):
    """What stands in for the layers of experts."""

    def choose(self, layer: ExpertLayer, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return for tokens ``x`` [T, width] the weighted sum over their experts ``chosen`` [T, k]."""
        ...

    def every(self, layer: ExpertLayer, x: Tensor, tokens: Tensor) -> Tensor:
        """Return what each expert makes of its ``tokens`` [experts, n]: [experts * n, width]."""
        ...


@dataclass(frozen=True, eq=False)
class ExpertLayer:
    """One layer of experts: its number among them, its name, how many experts, and what each makes of rows.

    ``chosen``: how many experts each token has; 0 where experts choose tokens.
    """

    number: int
    name: str
    experts: int
    chosen: int
    each: Sequence[Callable[[Tensor], Tensor]]
