"""What differences of parameters take by the codes that won, and what these cost training."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs.matrices.factors import Cut

# What ``Entropy(DeadZone(step_for(bits)))`` took a value of AdamW's differences, by ``bits`` (a probe).
DENSE_BITS = ((0.6, 0.33), (1.2, 1.08))
# What ``Entropy(Factors(rank))`` took of the same: a level of its factors, and a value of no matrix.
LEVEL_BITS, LOOSE_BITS = 2.6, 5.0
# How many times the steps of an exact mean training needs to the same loss, by bits and by rank. "probe" is
# one seed of gpt2-lab with AdamW, 60 steps; "derived" is read off the probe's curve.
DENSE_COSTS = {1.2: 1.0, 0.6: 1.5}  # probe, derived
FACTOR_COSTS = {8: 1.05, 4: 1.1, 2: 1.3}  # probe


@dataclass(frozen=True)
class Sides:
    """The matrices of a model: their rows and columns in all, and how many values are in none."""

    total: int
    loose: int

    @classmethod
    def of(cls, cut: Cut, values: int) -> Sides | None:
        """Return the sides of the matrices in ``values`` values; None where there are none.

        >>> Sides.of(((0, 3, 4),), 20)
        Sides(total=7, loose=8)
        """
        total = sum(rows + width for _, rows, width in cut)
        return cls(total, values - sum(rows * width for _, rows, width in cut)) if total else None


def dense_bits(bits: float) -> float:
    """Return what a value takes of a dense code of ``bits``.

    >>> dense_bits(1.2), dense_bits(2.4)
    (1.08, 2.16)
    """
    (low, few), (high, more) = DENSE_BITS
    if bits >= high:
        return bits * more / high
    return max(bits * few / low, more - (high - bits) * (more - few) / (high - low))


def factor_bits(rank: int, sides: Sides) -> float:
    """Return what the factors of all matrices take together, and the values of none."""
    return sides.total * rank * LEVEL_BITS + sides.loose * LOOSE_BITS
