"""What a plan for serving foretells, by property and by hand: rounds, chunks, drafts, layers, experts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.types import InputError
from thinwire.uses.serving.choosing.draft_length import FewestSeconds, tokens_a_round
from thinwire.uses.serving.choosing.expert_ways import ExpertShape, exchange_seconds, read_seconds
from thinwire.uses.serving.choosing.ring_forecast import (
    HEAD,
    PORTION,
    AskedOf,
    CodingCosts,
    PassCosts,
    RingLink,
    RingStage,
    TokenCurve,
    forecast,
)
from thinwire.uses.serving.choosing.stage_layers import ModelBytes, StageShare, share_layers

NOTHING = TokenCurve((1,), (0.0,))
FLAT = PassCosts(TokenCurve((1,), (1.0,)), NOTHING, NOTHING)  # a second a layer, whatever is in the pass
CODED = CodingCosts(TokenCurve((1, 10), (200.0 - HEAD - PORTION, 1000.0 - HEAD - PORTION)), NOTHING, NOTHING)
LINK = RingLink(rate=1000.0, delay=0.5, restarts=False)
POSITIVE = st.floats(0.01, 10.0)


def stages(*layers: int, costs: PassCosts = FLAT) -> list[RingStage]:
    return [RingStage(costs, CODED, n) for n in layers]


def test_two_chunks_and_three_tokens_are_those_of_a_clock_by_hand() -> None:
    found = forecast(stages(2, 3), LINK, AskedOf(prompt=20, tokens=3, chunk=10))
    back = 0.5 + (HEAD + PORTION) / 1000
    # The first chunk: computed at 2, on the line until 3, there at 3.5, done at 6.5. The second: computed at
    # 4, there at 5.5, waits, done at 9.5; then its token goes back.
    assert found.first_token_s == pytest.approx(9.5 + back)
    around = 2 + 0.2 + 0.5 + 3 + back
    assert found.tokens_per_second == found.all_per_second == pytest.approx(1 / around)
    assert found.nbytes == 2 * 1000 + 2 * 200 + 3 * (HEAD + PORTION)


def test_the_line_is_what_decides_where_it_is_slow() -> None:
    found = forecast(stages(1, 1), replace(LINK, rate=100.0), AskedOf(prompt=30, tokens=2, chunk=10))
    assert found.first_token_s == pytest.approx(1 + 3 * 10 + 0.5 + 1 + 0.5 + (HEAD + PORTION) / 100)


def test_a_window_that_shut_costs_round_trips() -> None:
    fast = RingLink(rate=1e6, delay=0.5)
    large = CodingCosts(TokenCurve((1, 10), (1e3, 1e5)), NOTHING, NOTHING)
    ring = [RingStage(FLAT, large, 1)] * 2
    asked = AskedOf(prompt=10, tokens=2, chunk=10)
    open_s = forecast(ring, replace(fast, restarts=False), asked).first_token_s
    idle = 2 * 1.0 - (14_480 + 28_960) / 1e6  # two windows, each a round trip less what it took to leave
    assert forecast(ring, fast, asked).first_token_s == pytest.approx(open_s + idle)


@given(POSITIVE, POSITIVE, st.integers(1, 40))
def test_more_bandwidth_and_less_delay_are_never_slower(rate: float, more: float, prompt: int) -> None:
    asked = AskedOf(prompt, tokens=4, chunk=10)
    links = [
        RingLink(1e3 * rate, 0.1),
        RingLink(1e3 * (rate + more), 0.1),
        RingLink(1e3 * (rate + more), 0.0),
    ]
    found = [forecast(stages(2, 1, 2), link, asked) for link in links]
    for slower, faster in pairwise(found):
        assert faster.first_token_s <= slower.first_token_s + 1e-9
        assert faster.tokens_per_second >= slower.tokens_per_second - 1e-9


@given(st.integers(1, 5), st.integers(1, 40), st.integers(2, 6))
def test_one_stage_is_one_machine_whatever_the_link(layers: int, prompt: int, tokens: int) -> None:
    found = forecast(stages(layers), LINK, AskedOf(prompt, tokens, chunk=10))
    assert found.first_token_s == pytest.approx(layers * -(-prompt // 10))
    assert found.tokens_per_second == pytest.approx(1 / layers) and found.nbytes == 0


def test_texts_at_once_share_passes() -> None:
    one, four = (forecast(stages(2, 2), LINK, AskedOf(1, 40, many, chunk=10)) for many in (1, 4))
    assert four.tokens_per_second < one.tokens_per_second < four.all_per_second / 3


@settings(max_examples=30)
@given(st.floats(0.05, 0.95), st.floats(0.0, 0.2))
def test_drafts_give_what_a_round_is_expected_to(right: float, token: float) -> None:
    costs = PassCosts(TokenCurve((1, 17), (1.0, 1.0 + 16 * token)), NOTHING, NOTHING)
    ring = [RingStage(costs, CodingCosts(TokenCurve((1,), (1.0,)), NOTHING, NOTHING), 1)] * 2
    free, asked = RingLink(None, 1.0), AskedOf(1, 400, chunk=10)
    found = forecast(ring, free, asked, right)
    best = min((4 + 2 * k * token) / tokens_a_round(right, k) for k in range(FewestSeconds().most + 1))
    # The first rounds have no drafts, and the last one fewer.
    assert best * 0.999 < 1 / found.tokens_per_second < best + 3 * (4 + 32 * token) / 399
    assert found.tokens_per_second >= forecast(ring, free, asked).tokens_per_second * 0.999


@given(st.lists(st.tuples(POSITIVE, st.integers(1, 30)), min_size=1, max_size=5), st.integers(0, 4), POSITIVE)
def test_a_faster_machine_gets_no_fewer_layers(
    machines: list[tuple[float, int]], which: int, speed: float
) -> None:
    shares = [StageShare(seconds, 0.5 * seconds, room) for seconds, room in machines]
    layers = min(30, sum(room for _, room in machines))
    found = share_layers(shares, layers)
    assert sum(found) == layers
    assert all(0 < n <= share.room for n, share in zip(found, shares, strict=True))
    which %= len(shares)
    shares[which] = replace(shares[which], layer=shares[which].layer / (1 + speed))
    assert share_layers(shares, layers)[which] >= found[which]


@given(POSITIVE, POSITIVE, POSITIVE, POSITIVE, st.sampled_from([1.0, 2.0]))
def test_a_stage_has_room_for_no_more_than_its_memory_holds(
    layer: float, cache: float, ends: float, memory: float, loading: float
) -> None:
    need = ModelBytes(layer, cache, ends, 2 * ends, ends / 2, loading)
    for first, last in ((True, False), (False, True), (True, True)):
        n = need.room(3 * memory, 20, first, last)
        assert n == 0 or need.needed(n, first, last) <= 3 * memory
        assert n == 20 or need.needed(n + 1, first, last) > 3 * memory


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="memory for 7 of 8 layers; add one, or lower --cache"):
        share_layers([StageShare(1.0, 0.0, 3), StageShare(1.0, 0.0, 4)], 8)
    with pytest.raises(InputError, match="machine 2 has no memory for a single layer"):
        share_layers([StageShare(1.0, 0.0, 9), StageShare(1.0, 0.0, 0)], 8)
    with pytest.raises(InputError, match="3 machines for 2 layers"):
        share_layers([StageShare(1.0, 0.0, 9)] * 3, 2)


def test_experts_wait_twice_a_layer_and_are_read_but_once() -> None:
    shape = ExpertShape(layers=10, experts=8, active=2, nbytes=1e6, width=1e3)
    assert exchange_seconds(shape, 2, 1, None, 0.02) == pytest.approx(10 * 2 * 0.02)
    sent = 0.75 * 1e3 / 1e6  # a token is sent where any of its two experts is elsewhere
    assert exchange_seconds(shape, 2, 1, 1e6, 0.0) == pytest.approx(20 * sent)
    assert exchange_seconds(shape, 1, 1, 1e6, 0.02) == 0
    assert read_seconds(shape, 1, 0.0, 1e9) == pytest.approx(10 * 2 * 1e6 / 1e9)
    assert read_seconds(shape, 10**6, 0.25, 1e9) == pytest.approx(0.75 * 10 * 8 * 1e6 / 1e9)
