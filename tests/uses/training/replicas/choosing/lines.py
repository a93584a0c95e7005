"""Sites to choose for, as measured or drawn."""

from __future__ import annotations

import random
from dataclasses import replace

from thinwire.choosing.difference_codes import Sides
from thinwire.uses.training.replicas.choosing.replica_policy import ReplicaChoice, ReplicaSite

MBIT = 125e3  # bytes/s


def cnn(mbit: float = 20, delay: float = 0.03, **changes: object) -> ReplicaSite:
    """Return a rank of a small CNN with SGD."""
    return replace(ReplicaSite(417_482, 2, 0.04, 0.0, mbit * MBIT, delay), **changes)  # type: ignore[arg-type]


def gpt2(mbit: float = 40, delay: float = 0.05, **changes: object) -> ReplicaSite:
    """Return a rank of gpt2-lab with AdamW."""
    site = ReplicaSite(4_470_272, 2, 0.307, 0.09, mbit * MBIT, delay, sides=Sides(22_016, 13_824))
    return replace(site, **changes)  # type: ignore[arg-type]


def drawn(draw: random.Random) -> ReplicaSite:
    """Return a rank of any model on any link."""
    values, replicas = 10 ** draw.randrange(5, 9), draw.choice([2, 4, 8])
    compute, rate, delay = (10 ** draw.uniform(*limits) for limits in ((-2, 1), (5, 9), (-4, 0)))
    sides = None if replicas == 2 else Sides(int(2 * values**0.5), values // 300)
    return ReplicaSite(values, replicas, compute, 0.0, rate, delay, sides=sides)


def wavering(site: ReplicaSite, draw: random.Random) -> ReplicaSite:
    """Return the rank with rate and delay a tenth off, either way."""
    rate, delay = ((x or 0.0) * draw.uniform(0.9, 1.1) for x in (site.rate, site.delay))
    return replace(site, rate=rate, delay=delay)


def predicted(choice: ReplicaChoice) -> float:
    """Return the step that a choice predicts."""
    assert choice.predicted is not None
    return choice.predicted
