"""How many tokens to draft before the next trip around the ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST = 16


@dataclass(frozen=True)
class DraftSite:
    """What was measured of one request's rounds. Seconds.

    ``accepted``: the share of drafts that were right, of those whose turn came. ``trip``: around the ring
    without drafts. ``token``: what one more token in a round costs all stages. ``draft``: what drafting one
    costs.
    """

    accepted: float
    trip: float
    token: float = 0.0
    draft: float = 0.0


@dataclass(frozen=True)
class FewestSeconds:
    """Draft so many tokens that a token takes the least time, as expected.

    Of k drafts, each right with probability a while all before it were, a round gives
    (1 - a^(k + 1)) / (1 - a) tokens (Leviathan et al., arXiv 2211.17192, equation 1). It takes
    trip + k (token + draft) seconds.

    >>> FewestSeconds().choose([DraftSite(0.8, trip=0.1, draft=0.002), DraftSite(0.0, trip=0.1)])
    [11, 0]
    """

    most: int = MOST

    def choose(self, sites: Sequence[DraftSite]) -> list[int]:
        """Return a length for each site."""
        return [min(range(self.most + 1), key=lambda k: _seconds_a_token(site, k)) for site in sites]


def tokens_a_round(accepted: float, k: int) -> float:
    """Return how many tokens a round with ``k`` drafts gives, as expected.

    >>> tokens_a_round(0.5, 2), tokens_a_round(0.9, 0)
    (1.75, 1.0)
    """
    a = min(max(accepted, 0.0), 0.999)
    return (1 - a ** (k + 1)) / (1 - a)


def _seconds_a_token(site: DraftSite, k: int) -> float:
    return (site.trip + k * (site.token + site.draft)) / tokens_a_round(site.accepted, k)
