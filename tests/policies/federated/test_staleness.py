"""Discounts: whole at no staleness, never rising, the formulas at a few points."""

from __future__ import annotations

from itertools import pairwise

import pytest

from thinwire.policies.federated.staleness import FEDBUFF, UNDISCOUNTED, Discount, Hinge, Polynomial
from thinwire.types import InputError


@pytest.mark.parametrize("discount", [FEDBUFF, UNDISCOUNTED, Polynomial(2.0, 0.6), Hinge(), Hinge(0.0)])
def test_a_discount_never_rises_and_stays_a_weight(discount: Discount) -> None:
    weights = [discount.weight(s) for s in range(100)]
    assert isinstance(discount, Discount)
    assert all(0 < b <= a for a, b in pairwise(weights))
    assert weights[0] == getattr(discount, "scale", 1.0)


def test_the_formulas() -> None:
    assert FEDBUFF.weight(8) == pytest.approx(1 / 3)
    assert UNDISCOUNTED.weight(10**6) == 1
    assert Polynomial(exponent=0.5, scale=0.6).weight(3) == pytest.approx(0.3)
    assert [Hinge(10, 4).weight(s) for s in (3, 4, 6)] == [1, 1, pytest.approx(1 / 21)]


def test_what_comes_from_the_future_is_refused() -> None:
    with pytest.raises(InputError, match=r"staleness of -1 versions.*give"):
        FEDBUFF.weight(-1)
