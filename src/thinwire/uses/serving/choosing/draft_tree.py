"""Which drafts to send with the next trip: a tree of them, of which one path can be right."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

MOST = 16  # nodes
ROOT = -1


class DraftTree(NamedTuple):
    """Nodes, parents before their children: the parent of each (``ROOT``: what is known), and its rank.

    The rank is the place of a node's token among those that a head says may follow its parent, from 0.
    The nodes of rank 0 behind each other, which are right most often, come first.
    """

    parents: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    @classmethod
    def chain(cls, many: int) -> DraftTree:
        """Return so many nodes behind each other."""
        return cls(tuple(range(ROOT, many - 1)), (0,) * many)

    @property
    def depth(self) -> int:
        """How far the last of the nodes is from what is known; 0 without any."""
        return max(depths(self.parents), default=0)

    @property
    def is_ordered(self) -> bool:
        """Whether each node stands behind one that is before it, or behind what is known."""
        return all(ROOT <= parent < i for i, parent in enumerate(self.parents))

    @property
    def is_chain(self) -> bool:
        """Whether each node stands behind the one before."""
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    def first(self, many: int) -> DraftTree:
        """Return its first nodes."""
        return DraftTree(self.parents[:many], self.ranks[:many])


def depths(parents: Sequence[int]) -> list[int]:
    """Return how far each node is from what is known: 1 for the first behind it.

    >>> depths((-1, 0, -1))
    [1, 2, 1]
    """
    found: list[int] = []
    for parent in parents:
        found.append(1 + (found[parent] if parent >= 0 else 0))
    return found


def best_tree(
    shares: Sequence[float], trip: float, token: float = 0.0, level: float = 0.0, most: int = MOST
) -> DraftTree:
    """Return the tree by which a token takes the least time, as expected.

    ``shares``: how often the candidate of each rank is right, where its parent is. ``trip``, ``token``,
    ``level``: seconds of a round without drafts, of a node more in it, of drafting all nodes of one depth.
    A node is reached with the product of the shares on its way (as in Sequoia, Chen et al., arXiv 2402.12374,
    section 3, where shares depend on the rank alone). Nodes are taken by that product.

    >>> best_tree([0.6, 0.2], trip=0.1, token=0.002, most=4)
    DraftTree(parents=(-1, 0, 1, -1), ranks=(0, 0, 0, 1))
    >>> best_tree([0.0, 0.0], trip=0.1, token=0.002)
    DraftTree(parents=(), ranks=())
    """
    waiting = [(-shares[0], ROOT, 0, 1)]
    taken: list[tuple[int, int, int]] = []  # parent, rank, depth
    expected, best, least = 1.0, 0, trip
    while waiting and len(taken) < most:
        minus, parent, rank, depth = heapq.heappop(waiting)
        if minus >= 0:
            break
        taken.append((parent, rank, depth))
        expected -= minus
        seconds = (trip + len(taken) * token + max(d for *_, d in taken) * level) / expected
        if seconds < least:
            best, least = len(taken), seconds
        if rank + 1 < len(shares):  # its sibling
            heapq.heappush(waiting, (minus / shares[rank] * shares[rank + 1], parent, rank + 1, depth))
        heapq.heappush(waiting, (minus * shares[0], len(taken) - 1, 0, depth + 1))
    return _ordered([(parent, rank) for parent, rank, _ in taken[:best]])


def _ordered(nodes: Sequence[tuple[int, int]]) -> DraftTree:
    """Return nodes as a tree, those of rank 0 behind each other first."""
    main = list[int]()
    for i, (parent, rank) in enumerate(nodes):
        if rank == 0 and parent == (main[-1] if main else ROOT):
            main.append(i)
    order = main + [i for i in range(len(nodes)) if i not in set(main)]
    place = {ROOT: ROOT} | {old: new for new, old in enumerate(order)}
    return DraftTree(tuple(place[nodes[i][0]] for i in order), tuple(nodes[i][1] for i in order))
