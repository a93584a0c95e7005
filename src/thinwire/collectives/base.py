"""The contracts of an exchange: post what belongs to a step, go on computing, collect it later."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from thinwire.links.base import Data


class Exchange(Protocol):
    """One message of each participant to every other, by step.

    All participants post and collect the same steps. ``post`` queues and returns, and the message travels
    while the caller computes, so several steps can be on their way. A step is posted once and collected
    once. A peer may be ahead: what it sent for later steps waits until it is collected::

        exchange.post(step, payload)
        ...                                       # compute
        if step >= staleness:
            payloads = exchange.collect(step - staleness, deadline=180.0)

    Not for several threads at once, except that one may post while another collects.
    """

    @property
    def rank(self) -> int:
        """This participant."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """All participants in ascending order, this one included."""
        ...

    @property
    def capacity(self) -> int | None:
        """Bytes of a message that fit at most; None where any length does."""
        ...

    def post(self, step: int, payload: Data) -> int:
        """Send ``payload`` to every peer in the background; return how many of its bytes fit, from the first.

        The rest is not sent: the caller keeps it. ``payload`` is copied, so its buffer is free on return.
        Errors: ``LinkError`` that names a peer which is lost.
        """
        ...

    def collect(self, step: int, deadline: float) -> dict[int, bytes]:
        """Return what every peer posted for ``step``, by rank in ascending order.

        Errors: ``LinkError`` that names the silent peer after ``deadline`` seconds without progress, or one
        that is lost. Bytes that still arrive are progress: a slow line is not late.
        """
        ...

    def drain(self, deadline: float) -> None:
        """Wait until all peers have what was posted; errors as for ``collect``."""
        ...

    def close(self, timeout: float = 5.0) -> None:
        """Drain for at most ``timeout`` seconds, without errors; later posts are refused. Safe to call twice.

        The links or the group below stay open: they belong to whoever made them.
        """
        ...


class Reduction(Protocol):
    """The sum over all participants of a flat tensor (fp32 or bf16), by step; otherwise like ``Exchange``.

    The sum has the dtype of the tensors and the same bits on every rank: each part is summed in one place,
    in the order of the ranks, in fp32.
    """

    @property
    def rank(self) -> int:
        """This participant."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """All participants in ascending order, this one included."""
        ...

    def post(self, step: int, values: Tensor) -> None:
        """Begin to sum ``values`` in the background; they are copied, so the caller may change them."""
        ...

    def collect(self, step: int, deadline: float) -> Tensor:
        """Return the sum for ``step``, a new tensor of the posted one's shape.

        Errors: as for ``Exchange.collect``, and ``PayloadError`` for a peer whose tensor has another size.
        """
        ...

    def drain(self, deadline: float) -> None:
        """Wait until all peers have what this rank owes them for what both sides posted."""
        ...

    def close(self, timeout: float = 5.0) -> None:
        """Drain for at most ``timeout`` seconds, without errors. Safe to call twice."""
        ...
