"""How many layers each machine gets: by its speed, and by what its memory holds."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.types import InputError, require


@dataclass(frozen=True)
class ModelBytes:
    """What a served model needs of memory, in bytes.

    ``layer``: weights of the largest layer; ``cache``: keys and values of one layer; ``first``, ``last``:
    what the first stage has before its layers, and the last one behind them; ``shared``: of these, what one
    machine has once. ``loading``: bytes that a byte of weights takes while the stage is loaded.
    """

    layer: float
    cache: float
    first: float
    last: float
    shared: float = 0.0
    loading: float = 1.0

    def held(self, layers: int, first: bool, last: bool) -> float:
        """Return what a stage holds while it serves."""
        return self._weights(layers, first, last) + layers * self.cache

    def needed(self, layers: int, first: bool, last: bool) -> float:
        """Return what a stage needs, while it is loaded or serves."""
        return max(self._weights(layers, first, last) * self.loading, self.held(layers, first, last))

    def _weights(self, layers: int, first: bool, last: bool) -> float:
        own = layers * self.layer + first * self.first + last * self.last
        return own - (self.shared if first and last else 0.0)

    def room(self, memory: float, most: int, first: bool, last: bool) -> int:
        """Return how many layers, ``most`` at most, a machine holds; 0 where not even one fits."""
        return max((n for n in range(1, most + 1) if self.needed(n, first, last) <= memory), default=0)


@dataclass(frozen=True)
class StageShare:
    """What decides over a machine's layers: seconds of one, seconds beside them, how many it has room for."""

    layer: float
    rest: float
    room: int


def share_layers(machines: Sequence[StageShare], layers: int) -> list[int]:
    """Return the layers of each machine, so that the slowest stage is as fast as can be within all memories.

    Each layer in turn goes to the stage that is then the least full: with equal layers nothing is better, and
    a faster machine gets no fewer. Errors: ``InputError`` where they do not fit.

    >>> share_layers([StageShare(1.0, 0.0, 99), StageShare(3.0, 0.0, 99)], 8)
    [6, 2]
    >>> share_layers([StageShare(1.0, 0.0, 4), StageShare(3.0, 0.0, 99)], 8)
    [4, 4]
    """
    n = len(machines)
    require(n <= layers, InputError, f"{n} machines for {layers} layers; each needs one, so leave some out")
    for k, machine in enumerate(machines, 1):
        require(
            machine.room > 0,
            InputError,
            f"machine {k} has no memory for a single layer; lower --cache, or leave it out",
        )
    held = sum(min(m.room, layers) for m in machines)
    wrong = f"all machines together have memory for {held} of {layers} layers; add one, or lower --cache"
    require(held >= layers, InputError, wrong)
    found = [1] * n
    next_ones = [(2 * m.layer + m.rest, k) for k, m in enumerate(machines) if m.room > 1]
    heapq.heapify(next_ones)
    for _ in range(layers - n):
        _, k = heapq.heappop(next_ones)
        found[k] += 1
        if found[k] < machines[k].room:
            heapq.heappush(next_ones, ((found[k] + 1) * machines[k].layer + machines[k].rest, k))
    return found
