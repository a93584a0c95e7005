"""Which rank computes which expert."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.types import InputError, require


class Owners:
    """``given``: the rank of each expert; None deals them out in turn, expert 0 to the first rank."""

    def __init__(self, ranks: Sequence[int], given: Sequence[int] | None = None) -> None:
        whole = isinstance(given, Sequence) and all(type(rank) is int for rank in given)
        text = f"owners {given!r:.40} are no ranks; give one for each expert, as [0, 1, 0, 1]"
        require(given is None or whole, InputError, text)
        self._ranks, self._given = tuple(ranks), None if given is None else tuple(given)
        for expert, rank in enumerate(self._given or ()):
            text = f"expert {expert} is given to rank {rank}, which nobody is; give it one of {self._ranks}"
            require(rank in self._ranks, InputError, text)

    def __str__(self) -> str:
        return "dealt out in turn" if self._given is None else str(self._given)

    def of(self, experts: int) -> dict[int, list[int]]:
        """Return the experts of each rank, of a layer that has so many. Errors: ``InputError``."""
        given = self._given
        if given is None:
            given = tuple(self._ranks[e % len(self._ranks)] for e in range(experts))
        text = f"owners are given for {len(given)} experts, and a layer has {experts}; name a rank for each"
        require(len(given) == experts, InputError, text)
        return {rank: [e for e in range(experts) if given[e] == rank] for rank in self._ranks}
