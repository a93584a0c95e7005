"""What is found out about values on a device, and acted on later: so that coding them waits for nothing.

A codec that finds a NaN says so by ``refuse``. Its finding is a tensor, and to read one makes the program
wait until the device has done all that was queued before. So inside ``deferred()`` the findings about a
device are collected, and cross to the host with the message they are about, in its one copy. Elsewhere, and
about tensors of the CPU, ``refuse`` raises at once. What comes of a refused value must not matter: whoever
collects asks before anything is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from thinwire import staging

FINITE = (-3.4028234663852886e38, 3.4028234663852886e38)  # the bounds of float32
_active = threading.local()
Refusal = Callable[[], Exception]
Answered = Callable[[list[Tensor]], object]


class Verdicts:
    """Findings that were not asked for yet. ``undo`` is called before the error of one is raised."""

    def __init__(self) -> None:
        self.undo: Callable[[], object] | None = None
        self._found: list[tuple[Tensor, Refusal]] = []

    def tensors(self) -> list[Tensor]:
        """Return all findings, to be copied to the host with a message: one value each."""
        return [found for found, _ in self._found]

    def settle(self, read: Sequence[Tensor] | None = None) -> None:
        """Raise the first error there is.

        ``read``: what ``tensors`` returned, on the host; by default they are copied now, and waited for.
        """
        if not self:
            return
        if read is None:
            read = staging.to_host(self.tensors()).tensors()
        values = [t.item() for t in read]
        for wrong, (_, error) in zip(values, self._found, strict=True):
            if wrong:
                if self.undo is not None:
                    self.undo()
                raise error()

    def __bool__(self) -> bool:
        return bool(self._found)

    def _add(self, wrong: Tensor, error: Refusal) -> None:
        self._found.append((wrong.detach().reshape(()), error))


class Questions:
    """What is to be asked about tensors of a device, all of it later: in one copy, with one wait."""

    def __init__(self) -> None:
        self._asked: list[tuple[list[Tensor], Answered]] = []

    def ask(self, tensors: Sequence[Tensor], answered: Answered) -> None:
        """Call ``answered`` later with these tensors of one device, on the host: it raises what is wrong."""
        if tensors:
            self._asked.append((list(tensors), answered))

    def settle(self) -> None:
        """Read what was asked for, and raise the first error there is."""
        asked, self._asked = self._asked, []
        if not asked:
            return
        read = iter(staging.to_host([t for tensors, _ in asked for t in tensors]).tensors())
        for tensors, answered in asked:
            answered([next(read) for _ in tensors])


class deferred:
    """Collect what is found about tensors of a device by this thread, until the end of the block.

    Whoever collects calls ``settle`` in the end, and uses no result before. The innermost block collects.

    >>> import torch
    >>> with deferred() as found:
    ...     refuse(torch.tensor(False), lambda: ValueError("no"))
    >>> bool(found)  # about the CPU, refuse asks at once
    False
    """

    def __enter__(self) -> Verdicts:
        self._outer: Verdicts | None = getattr(_active, "verdicts", None)
        found = _active.verdicts = Verdicts()
        return found

    def __exit__(self, *error: object) -> None:
        _active.verdicts = self._outer


def collecting(x: Tensor) -> Verdicts | None:
    """Return what collects findings about ``x``; None where they are asked for at once."""
    return None if x.device.type == "cpu" else getattr(_active, "verdicts", None)


def refuse(wrong: Tensor, error: Refusal) -> None:
    """Raise ``error()`` if ``wrong``, one value, is true: now, or when whoever collects asks.

    ``error`` may not read the device: it is called long after.
    """
    found = collecting(wrong)
    if found is not None:
        found._add(wrong, error)
    elif bool(wrong):
        raise error()


def refuse_outside(low: Tensor, high: Tensor, bounds: tuple[float, float], error: Refusal) -> None:
    """Refuse values whose smallest or largest, a NaN where there is any, lies outside ``bounds``."""
    if collecting(low) is None:  # as numbers: a few operations of torch on one value take longer
        if not (bounds[0] <= float(low) and float(high) <= bounds[1]):
            raise error()
    else:
        refuse(((low >= bounds[0]) & (high <= bounds[1])).logical_not(), error)
