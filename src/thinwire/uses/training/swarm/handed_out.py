"""Who has which samples: what a keeper or a branch handed out, until it is answered or given anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class HandedOut:
    """The samples that each client has, or that it trained on last, by numbers of whoever hands them out.

    >>> handed = HandedOut()
    >>> handed.give(5, [7, 3, 5, 8])
    >>> handed.settle(5, done=True, left=[(1, 2)]), handed.of(5), handed.settle(5, done=True)
    (([7, 8], [3, 5]), [7, 8], ([], []))
    """

    def __init__(self) -> None:
        self.under_way: dict[int, list[int]] = {}  # by client
        self.answered: dict[int, list[int]] = {}  # trained on last, by client

    def give(self, client: int, ids: list[int]) -> None:
        """Note that a client has these, of whom nothing is under way."""
        self.under_way[client] = ids
        self.answered.pop(client, None)

    def settle(
        self, client: int, done: bool, left: Iterable[tuple[int, int]] = ()
    ) -> tuple[list[int], list[int]]:
        """Return what a client trained on, and what others may have; nothing where nothing is under way.

        ``left``: as of ``WorkSource.settle``.
        """
        ids = self.under_way.pop(client, None)
        if ids is None:
            return [], []
        trained, again = parted(ids, left) if done else ([], ids)
        if done:
            self.answered[client] = trained
        return trained, again

    def of(self, client: int) -> list[int] | None:
        """Return what a client has, or trained on last; None where there is neither."""
        return self.under_way.get(client, self.answered.get(client))


def parted(ids: Sequence[int], left: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return which of ``ids`` were trained on, and which were ``left``, as pairs of a place and how many.

    >>> parted([7, 3, 5, 8], [(1, 2)])
    ([7, 8], [3, 5])
    """
    over = {i for first, many in left for i in range(first, first + many)}
    trained = [x for i, x in enumerate(ids) if i not in over]
    return trained, [x for i, x in enumerate(ids) if i in over]
