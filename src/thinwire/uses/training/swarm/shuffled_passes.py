"""Sample numbers without end: each pass takes every one once, in an order of its own."""

from __future__ import annotations

import torch


class ShuffledPasses:
    """The numbers 0 .. ``samples`` - 1, shuffled anew by ``seed`` for each pass; ``taken``: how many went.

    >>> passes = ShuffledPasses(4, seed=0)
    >>> sorted(passes.take(4)), len(passes.take(6)), passes.taken
    ([0, 1, 2, 3], 6, 10)
    """

    def __init__(self, samples: int, seed: int, taken: int = 0) -> None:
        self.samples, self.seed, self.taken = samples, seed, taken
        self._pass, self._order = -1, list[int]()

    def take(self, n: int) -> list[int]:
        """Return the next ``n`` numbers; a pass that ends among them is followed by the next one."""
        found: list[int] = []
        while len(found) < n:
            number, at = divmod(self.taken, self.samples)
            part = self._of(number)[at : at + n - len(found)]
            found += part
            self.taken += len(part)
        return found

    def _of(self, number: int) -> list[int]:
        if number != self._pass:
            draw = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            self._pass, self._order = number, torch.randperm(self.samples, generator=draw).tolist()
        return self._order
