"""Which part of the tokens each rank has: shares that differ by at most one, as ``tensor_split`` has them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from thinwire.types import InputError, require


class Shares:
    """The inputs that were split in one call of the model, and what follows for the peers' parts.

    Replicated tokens, such as text that a plan does not split, may not be gathered: they would count once
    for each rank. So a part that is gathered must be made of shares.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._split: dict[str, int] = {}

    def clear(self) -> None:
        """Forget the inputs of the last call."""
        self._split.clear()

    @property
    def split(self) -> bool:
        """Whether tokens were split in this call."""
        return bool(self._split)

    def cut(self, name: str, x: Tensor, dim: int, of: Sequence[str] = ()) -> Tensor:
        """Return this rank's share of ``x`` along ``dim``.

        ``of``: names of inputs that were cut before. If ``x`` is as long as these together, it is made of
        shares of a part for each; if not, it is no input of tokens, and stays whole.
        """
        n = x.shape[dim]
        if of:
            lengths = [self._split.get(each, 0) for each in of]
            if sum(lengths) != n:
                return x
            parts = [part.tensor_split(self.world, dim)[self.rank] for part in x.split(lengths, dim)]
            return torch.cat(parts, dim)
        text = f"{name} has {n} tokens, too few for {self.world} ranks; use fewer ranks"
        require(n >= self.world, InputError, text)
        if x.dim() == 3 and x.is_floating_point():  # tokens with their channels, not positions or masks
            self._split[name] = n
        return x.tensor_split(self.world, dim)[self.rank]

    def lengths(self, own: int, what: str) -> dict[int, set[int]]:
        """Return which lengths each rank's part may have where this rank's has ``own`` tokens.

        Errors: ``InputError`` where no set of split inputs makes a part of that length.
        """
        found: dict[int, set[int]] = {rank: set() for rank in range(self.world)}
        totals = list(self._split.values())
        for size in range(1, len(totals) + 1):
            for some in combinations(totals, size):
                if sum(self._share(n, self.rank) for n in some) == own:
                    for rank, lengths in found.items():
                        lengths.add(sum(self._share(n, rank) for n in some))
        text = f"{what} has {own} tokens here, no shares of what was split, {self._split}; use mode one"
        require(bool(found[self.rank]), InputError, text)
        return found

    def _share(self, n: int, rank: int) -> int:
        return n // self.world + (rank < n % self.world)
