"""What modes have in common in which whole calls of a model are computed, and their outputs exchanged."""

from __future__ import annotations

from contextlib import suppress

from thinwire.collectives import MeshExchange
from thinwire.types import LinkError
from thinwire.uses.pictures.coding import Coding, Endpoints
from thinwire.uses.pictures.messages import CheckedExchange
from thinwire.uses.pictures.model_calls import CountedCalls


class WholeOutputs(CountedCalls):
    """The outputs of one model, which ranks exchange once a call: how it begins and ends."""

    def __init__(self, exchange: MeshExchange, output: Coding, deadline: float) -> None:
        self._exchange, self._coding = CheckedExchange(exchange, deadline), output
        super().__init__(self._exchange.inquiry)
        self.tally = self._exchange.tally
        self._ranks, self._rank = exchange.ranks, exchange.rank
        self._forget()

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the others not to wait for this rank, in this picture and at the beginning of the next."""
        with suppress(LinkError):
            self._abandon(cause)
        self._exchange.leave(cause)
        with suppress(LinkError):
            self._abandon(cause)

    def _renew(self) -> None:
        self._exchange.renew()

    def _abandon(self, cause: BaseException | None = None) -> None:
        """Tell the others, who may wait for this call or for the next, that none comes."""
        for _ in range(2):
            self._exchange.abandon(cause)
            self._exchange.skip()

    def _forget(self) -> None:
        self._ends = Endpoints(self._coding, self._exchange.others)
        self._exchange.begin(self.clock.generation)
