"""How the work of a picture is divided over the ranks, and what a mode of doing so is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from thinwire.collectives import MeshExchange
from thinwire.spec import Spec
from thinwire.types import LinkError
from thinwire.uses.pictures.agreement import ModelOverRanks
from thinwire.uses.pictures.coding import Coding
from thinwire.uses.pictures.diffusers_names.plans import SplitPlan
from thinwire.uses.pictures.messages import ExchangeTally
from thinwire.uses.pictures.model_calls import StepCounter
from thinwire.uses.pictures.rank_message import RankMessage
from thinwire.uses.pictures.weight_checksums import WatchedWeights

TIME, SPACE = "time", "space"


@dataclass(frozen=True, repr=False)
class Division(Spec):
    """Which mode divides the work; the same on all ranks.

    >>> Division("ulysses")
    Division(mode='ulysses')
    """

    mode: str = "gather"
    patches: int = 0  # of mode pipe; 0 is as many as make a step shortest
    overlap: int = 25  # of mode latent: percent of its part by which a rank reaches over each neighbour's
    chained: int = 0  # of mode pipe: 1 codes a video's frames each against the one before
    over: str = TIME  # of mode pipe: whether the patches of a video are frames, or parts of each


class ParallelMode(ModelOverRanks, Protocol):
    """One model over several ranks, in one mode."""

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        """Send keys and values by ``attention``, and what the model returns by ``output``.

        Errors: ``InputError`` for a number of ranks that the mode does not serve.
        """
        ...

    def attached(self, model: nn.Module, plan: SplitPlan | None = None) -> AbstractContextManager[None]:
        """Let the calls of ``model`` exchange inside the block, and leave it as it was.

        ``plan``: how its tokens are split, where the mode does that; else by a plan that is known here.

        Errors: ``InputError``, one sentence, for a model that the mode cannot divide.
        """
        ...

    def watch(self, weights: WatchedWeights) -> None:
        """Compare these weights with the other ranks' in each call."""
        ...

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the peers not to wait for this rank any more, and why if it is an error."""
        ...


class Batch:
    """Mode batch: the ranks make different pictures, each its own, so the model exchanges nothing.

    It is as it was: the ranks only make sure, before, that theirs is the same.
    """

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        self.tally, self.clock = ExchangeTally(), StepCounter()
        self._exchange = exchange

    def attached(self, model: nn.Module, plan: SplitPlan | None = None) -> AbstractContextManager[None]:
        """Leave the model as it is."""
        return nullcontext()

    def watch(self, weights: WatchedWeights) -> None:
        """Do nothing: once the pictures are begun, each rank's are its own."""

    def reset(self) -> None:
        """Do nothing: no call depends on another."""

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the peers, should they still wait to compare their models, not to wait for this rank."""
        with suppress(LinkError):
            self._exchange.post(0, RankMessage.stop(cause).pack())
