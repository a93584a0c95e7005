"""How the work of a picture is divided over the ranks, and what a mode of doing so is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from thinwire.collectives import MeshExchange
from thinwire.spec import Spec
from thinwire.uses.pictures.context_parallel.clock import Clock
from thinwire.uses.pictures.context_parallel.coding import Coding
from thinwire.uses.pictures.context_parallel.host_plan import Plan
from thinwire.uses.pictures.context_parallel.tally import Tally
from thinwire.uses.pictures.context_parallel.weights import Weights


@dataclass(frozen=True, repr=False)
class Division(Spec):
    """Which mode divides the work; the same on all ranks.

    >>> Division("ulysses")
    Division(mode='ulysses')
    """

    mode: str = "gather"
    patches: int = 4  # of mode pipe


class Session(Protocol):
    """What runs a model over several ranks for as long as it is taken apart."""

    tally: Tally
    clock: Clock

    def reset(self) -> None:
        """Let the next call of the model begin a generation."""
        ...


class Mode(Session, Protocol):
    """One model over several ranks, in one mode."""

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        """Send keys and values by ``attention``, and what the model returns by ``output``.

        Errors: ``InputError`` for a number of ranks that the mode does not serve.
        """
        ...

    def attached(self, model: nn.Module, plan: Plan | None = None) -> AbstractContextManager[None]:
        """Let the calls of ``model`` exchange inside the block, and leave it as it was.

        ``plan``: how its tokens are split, where the mode does that; else by a plan that is known here.

        Errors: ``InputError``, one sentence, for a model that the mode cannot divide.
        """
        ...

    def watch(self, weights: Weights) -> None:
        """Compare these weights with the other ranks' in each call."""
        ...

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the peers not to wait for this rank any more, and why if it is an error."""
        ...
