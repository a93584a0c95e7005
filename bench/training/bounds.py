"""What a link leaves of a run's speed at best, and what counts as the same loss."""

from __future__ import annotations

from bench.training.rounds import PLACES
from thinwire.links.profile import Profile
from thinwire.links.shape import MTU, SEGMENT

SAME = 0.005  # a held-out loss within 0.5 % of fp32's counts as the same


def line_seconds(link: str, nbytes: float) -> float | None:
    """Return how long ``nbytes`` of payload take on the link's line; None where it has no one rate."""
    rate = Profile.parse(PLACES[link]).up
    return nbytes / (rate * SEGMENT / MTU) if rate else None


def bound(link: str, c: float, nbytes: float, microbatches: int) -> float | None:
    """Return C / (C + 2 (d + x / M)): what is left where all but the ends of a step is hidden.

    ``nbytes``: of a step, both directions; x is the line's time for half of them. Equal stages cannot do
    better [derived].
    """
    x = line_seconds(link, nbytes / 2)
    if x is None:
        return None
    delay = Profile.parse(PLACES[link]).delay or 0.0
    return float(c / (c + 2 * (delay + x / microbatches)))


def of_bound(share: float, bound: float | None) -> float | None:
    """Return what share of its bound was reached; None where there is none."""
    return share / bound if bound else None


def is_same(loss: float, base: float) -> bool:
    """Say whether a run ends with a loss as good as ``base``, which uncompressed fp32 ends with."""
    return loss <= base * (1 + SAME)
