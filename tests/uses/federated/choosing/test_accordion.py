"""ACCORDION: the high ratio while norms change, the low one when they do not, by its checks alone."""

from __future__ import annotations

import math

import pytest

from thinwire.codecs import TopK
from thinwire.rounds.client_profile import ClientProfile, Situation
from thinwire.uses.federated.choosing.accordion import Accordion

LOW, HIGH = 0.01, 0.1
DEVICES = [ClientProfile(i, 0.1 + i, samples=1 + i) for i in range(3)]


def ratio(norms: tuple[float, ...], version: int | None = None, **fields: float) -> float:
    situation = Situation(1000, len(norms) if version is None else version, norms=norms)
    codecs = {a.codec for a in Accordion(LOW, HIGH, **fields).assign(DEVICES, situation)}  # type: ignore[arg-type]
    (codec,) = codecs  # the same for all
    assert isinstance(codec, TopK)
    return codec.ratio


def test_it_starts_high_and_goes_low_when_norms_settle() -> None:
    assert [ratio(norms) for norms in ((), (4.0,), (4.0, 1.9), (4.0, 2.1), (4.0, 6.0), (4.0, 5.9))] == [
        HIGH,
        HIGH,
        HIGH,
        LOW,
        HIGH,
        LOW,
    ]
    assert ratio((4.0, 3.0), eta=0.2) == HIGH


def test_between_two_checks_nothing_changes() -> None:
    history = (
        8.0,
        1.0,
        1.0,
        7.0,
        1.0,
        1.0,
        1.0,
    )  # of versions 1 to 7; checked at 4 and, from 1, never before
    found = [ratio(history[:version], version, every=3) for version in range(1, 8)]
    assert found == [HIGH] * 5 + [LOW] * 2  # versions 3 and 6 have the same norm
    assert ratio(history[-5:], 7, every=3) == LOW  # the last norms are enough
    assert ratio(history[-4:], 7, every=3) == HIGH


@pytest.mark.parametrize("wrong", [0.0, math.nan, math.inf])
def test_a_norm_that_is_none_counts_as_a_change(wrong: float) -> None:
    assert ratio((wrong, 1.0)) == HIGH
    assert ratio((1.0, wrong)) == HIGH
