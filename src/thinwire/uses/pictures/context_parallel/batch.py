"""Mode batch: the ranks make different pictures, each its own, so the model exchanges nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress

from torch import nn

from thinwire.collectives import MeshExchange
from thinwire.types import LinkError
from thinwire.uses.pictures.context_parallel.clock import Clock
from thinwire.uses.pictures.context_parallel.coding import Coding
from thinwire.uses.pictures.context_parallel.division import Division
from thinwire.uses.pictures.context_parallel.host_plan import Plan
from thinwire.uses.pictures.context_parallel.message import Message
from thinwire.uses.pictures.context_parallel.tally import Tally
from thinwire.uses.pictures.context_parallel.weights import Weights


class Batch:
    """A model that is as it was: the ranks only make sure, before, that theirs is the same."""

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        self.tally, self.clock = Tally(), Clock()
        self._exchange = exchange

    def attached(self, model: nn.Module, plan: Plan | None = None) -> AbstractContextManager[None]:
        """Leave the model as it is."""
        return nullcontext()

    def watch(self, weights: Weights) -> None:
        """Do nothing: once the pictures are begun, each rank's are its own."""

    def reset(self) -> None:
        """Do nothing: no call depends on another."""

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the peers, should they still wait to compare their models, not to wait for this rank."""
        with suppress(LinkError):
            self._exchange.post(0, Message.stop(cause).pack())
