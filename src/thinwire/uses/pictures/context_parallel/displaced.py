"""Mode displaced: the peers' keys and values are those of the last step; own ones are fresh.

Source: DistriFusion (arXiv 2402.19481, section 4): after some synchronous steps, what a layer sends in one
step is used in the next, so that it travels while the ranks compute.
"""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor

from thinwire.channels.memory import NoMemory
from thinwire.collectives import MeshExchange
from thinwire.types import InputError, LinkError, require
from thinwire.uses.pictures.context_parallel.coding import Coding
from thinwire.uses.pictures.context_parallel.divided import Sent
from thinwire.uses.pictures.context_parallel.division import Division
from thinwire.uses.pictures.context_parallel.gather import Gather
from thinwire.uses.pictures.context_parallel.seam import Given

Parts = tuple[list[Tensor], list[Tensor]]


class Displaced(Gather):
    """Attention of own queries over own keys and values, and over those of the others a step ago."""

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        text = "mode displaced sends no residuals; give it a recipe without, such as displaced or int8"
        require(isinstance(attention.scheme.memory, NoMemory), InputError, text)
        self._last: dict[tuple[int, int], Sent | Parts] = {}  # by stream and layer
        super().__init__(exchange, attention, output, division, deadline)
        self._warmup = max(1, attention.warmup)

    def begin(self, given: Given) -> None:
        """Begin a call of the model, with the whole inputs."""
        if not self._ended:  # what is still due may never come
            self._last.clear()
        super().begin(given)

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the peers not to wait for this rank any more."""
        with suppress(LinkError):
            self._drop()
        super().leave(cause)

    def _forget(self) -> None:
        self._drop()
        super()._forget()

    def _drop(self) -> None:
        """Take what the last step of a whole picture sent: nobody needs it, and it would stay in memory."""
        for last in self._last.values() if self._ended or self._call.begins else ():
            if isinstance(last, Sent):
                self._traffic.drop(last.posted)
        self._last.clear()

    def _others(self, sent: Sent) -> Parts:
        place = sent.posted.key.stream, sent.posted.key.layer
        last = self._last.get(place)
        if last is None or self._call.step < self._warmup:
            last = self._last[place] = self._collect(sent)
        else:
            self._last[place] = sent
        return self._collect(last) if isinstance(last, Sent) else last
