"""What the papers claim: the rules of verdicts, and that every claim can be measured or says why not."""

from __future__ import annotations

import re
from dataclasses import replace
from math import exp

import pytest
from bench.papers.claims import Claim, every, targets
from bench.papers.measures import MEASURES
from bench.papers.page import FIELDS
from bench.papers.verdicts import Interval, Verdict, decided
from bench.study.cells import ROOT

from bench.papers import __main__ as program

WHY = "it sends 3× as much"


@pytest.mark.parametrize(
    ("found", "published", "cause", "verdict", "told"),
    [
        (None, 2.0, WHY, Verdict.MISSING, "not measured"),
        (Interval(2.0, 1.1, 3.0), None, "", Verdict.HOLDS, "holds"),
        (Interval(2.0, 1.1, 3.0), 2.5, WHY, Verdict.HOLDS, "holds; as large as published: undecided"),
        (Interval(2.0, 1.1, 3.0), 4.0, "", Verdict.HOLDS, "holds, smaller than published"),
        (Interval(2.0, 1.1, 3.0), 1.1, "", Verdict.HOLDS, "holds, as large as published"),
        (Interval(0.5, 0.4, 0.9), 2.0, WHY, Verdict.FAILS, f"does not hold, because {WHY}"),
        (Interval(0.5, 0.4, 0.9), 2.0, "", Verdict.UNDECIDED, "no measurement says why"),
        (Interval(2.0, 0.9, 3.0), 2.0, WHY, Verdict.UNDECIDED, "the interval holds both"),
        (Interval(2.0, 1.0, 3.0), 2.0, "", Verdict.UNDECIDED, "the interval holds both"),
        (Interval(1.2, 0.9, 1.9), 2.0, "", Verdict.FAILS, "does not hold in its size"),
        (Interval(1.2, 0.9, 1.9), None, "", Verdict.UNDECIDED, "the interval holds both"),
        (Interval.of([9.0]), 2.0, WHY, Verdict.UNDECIDED, "one run has no interval"),
        (Interval.of([9.0], ratios=True), 2.0, "", Verdict.UNDECIDED, "one run has no interval"),
    ],
)
def test_a_verdict_follows_from_intervals_alone(
    found: Interval | None, published: float | None, cause: str, verdict: Verdict, told: str
) -> None:
    became, words = decided(found, 1.0, published, cause)
    assert became == verdict and words.startswith(verdict) and told in words


def test_ratios_have_the_interval_of_their_logarithms() -> None:
    there, back = Interval.of([1.2, 2.0, 3.1], True), Interval.of([1 / 1.2, 1 / 2.0, 1 / 3.1], True)
    assert there and back and (1 / back.high, 1 / back.low) == pytest.approx((there.low, there.high))
    logs = Interval.of([0.0, 1.0, 2.0])
    assert logs and Interval.of([1.0, exp(1), exp(2)], True) == pytest.approx(tuple(map(exp, logs)))
    assert Interval.of([]) is None


def test_every_claim_is_measured_by_a_target_of_make_or_says_what_is_wanting() -> None:
    made = set(re.findall(r"^(bench-[a-z-]+): setup", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(targets()) <= made
    for claim in every().values():
        assert claim.field in FIELDS and (not claim.until or claim.until in every())
        ways = (bool(claim.measure and claim.target), bool(claim.blocked), bool(claim.wanting))
        assert sum(ways) == 1, claim.name
        if claim.measure:
            assert claim.measure in MEASURES and claim.target in targets()
        if claim.cause:
            assert claim.cause.measure in MEASURES and "{figure}" in claim.cause.text
    assert {c.measure for c in every().values()} | {
        c.cause.measure for c in every().values() if c.cause
    } >= set(MEASURES)


def test_what_is_missing_is_resumed_cheapest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(c for c in every().values() if c.measure)
    cheap, dear = sorted(targets(), key=lambda name: int(targets()[name]["minutes"]))[:: len(targets()) - 1]
    some = [
        replace(first, name="a", target=dear, runs=99),
        replace(first, name="b", target=cheap, runs=99),
        replace(first, name="c", target=cheap, runs=1),
        Claim("d", "p", "links", "c", "s", blocked="it is not there"),
        Claim("e", "p", "links", "c", "s", wanting="a card"),
    ]
    monkeypatch.setattr(program, "current", lambda: iter(some))
    assert program.wanted() == [cheap, dear]
    assert program.missing(some[0]).endswith(f"of 99 runs: make {dear}") and program.missing(some[4])
    assert not program.missing(some[2]) and not program.missing(some[3])
    assert some[3].verdict == (Verdict.BLOCKED, "cannot be run here, because it is not there")
