"""How often drafts are right, by their rank among the candidates for a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.uses.serving.choosing.draft_tree import DraftTree

KEPT = 0.95  # of a share, against what was seen last
FIRST = (0.5, 0.12, 0.06, 0.04)  # before anything was seen


@dataclass
class RankShares:
    """Shares of right drafts of one text, where the one before was right: of the likeliest, the next, ..."""

    of_rank: list[float] = field(default_factory=lambda: list(FIRST))

    def learn(self, tree: DraftTree, way: Sequence[int]) -> None:
        """Take in a round: its drafts, and which of them were right.

        >>> shares = RankShares()
        >>> for _ in range(200):
        ...     shares.learn(DraftTree((-1, -1), (0, 1)), [1])
        >>> [round(share, 2) for share in shares.of_rank]
        [0.0, 1.0, 0.06, 0.04]
        """
        for before, right in zip((-1, *way), (*way, None), strict=True):
            own = {rank: i for i, (p, rank) in enumerate(zip(*tree, strict=True)) if p == before}
            for rank, node in own.items():
                if rank < len(self.of_rank):
                    self.of_rank[rank] = KEPT * self.of_rank[rank] + (1 - KEPT) * (node == right)
