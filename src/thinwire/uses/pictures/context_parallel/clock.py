"""Which generation, guidance stream and step a call of the model belongs to: the same on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from thinwire.uses.pictures.context_parallel.keys import STREAMS


class Call(NamedTuple):
    """One call of the model: its stream's number, and how many calls of the stream came before it."""

    stream: int
    step: int
    begins: bool  # whether a generation begins with it


class Clock:
    """Number generations from 1, and the calls within each.

    A generation begins with the first call, after ``reset``, where the time goes back up, where the shapes of
    a stream's inputs change, where a named stream has its first time again (schedulers repeat later ones),
    and where there are more streams than keys can tell apart.
    A stream is the name that the caller gives it, else the call's place among those of one time.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._fresh, self._place = True, 0
        self._time: float | None = None
        self._first: float | None = None  # the time at which the generation began
        self._shapes: dict[Hashable, Hashable] = {}
        self._numbers: dict[Hashable, int] = {}
        self._calls: Counter[int] = Counter()

    def reset(self) -> None:
        """Let the next call begin a generation."""
        self._fresh = True

    def call(self, name: str | None, time: float | None, shapes: Hashable) -> Call:
        """Count a call of the stream ``name``; ``time`` falls from step to step."""
        again = time is not None and time == self._time
        self._place = self._place + 1 if again else 0
        stream: Hashable = self._place if name is None else name
        up = time is not None and self._time is not None and time > self._time
        over = name is not None and name in self._numbers and time is not None and time == self._first
        full = stream not in self._numbers and len(self._numbers) == STREAMS
        begins = self._fresh or up or over or full or self._shapes.get(stream, shapes) != shapes
        if begins:
            self._forget()
            self._first = time
            self.generation += 1
            stream = 0 if name is None else name
        self._time, self._shapes[stream] = time, shapes
        number = self._numbers.setdefault(stream, len(self._numbers))
        self._calls[number] += 1
        return Call(number, self._calls[number] - 1, begins)

    def _forget(self) -> None:
        self._fresh, self._place = False, 0
        for kept in (self._shapes, self._numbers, self._calls):
            kept.clear()
