"""Rules of aggregation, against their formulas."""

from __future__ import annotations

import pytest
import torch
from federation import RATE, SIZES, Federation, taken

from thinwire.rounds.aggregation import (
    ArrivedUpdate,
    FedAsync,
    FedBuff,
    Periodic,
    Rule,
    Synchronous,
    summed,
)
from thinwire.rounds.aggregation import (
    Federation as All,
)
from thinwire.rounds.local_training import Decay
from thinwire.rounds.parameters import unpack_row
from thinwire.rounds.update_messages import Update
from thinwire.types import InputError, ThinwireError

TWO = [ArrivedUpdate(0, 1, 30, staleness=0), ArrivedUpdate(3, 2, 10, staleness=3)]
ALL = All(clients=8, samples=160, asked=4)


@pytest.mark.parametrize(
    ("rule", "shares"),
    [
        (Synchronous(), [0.75, 0.25]),
        (Synchronous(rate=0.5), [0.375, 0.125]),
        (Synchronous("participants"), [8 / 4 * 30 / 160, 8 / 4 * 10 / 160]),
        (FedAsync(0.8, a=0.5), [0.8, 0.4]),
        (FedBuff(2), [0.5, 0.25]),
        (FedBuff(2, a=0.0, rate=3.0), [1.5, 1.5]),
        (Periodic(), [0.75, 0.25]),
        (Periodic(weights="equal", rate=0.7), [0.35, 0.35]),
        (Periodic(a=1.0), [0.75, 0.0625]),
    ],
    ids=str,
)
def test_shares_are_those_of_the_paper(rule: Rule, shares: list[float]) -> None:
    assert rule.shares(TWO, ALL) == pytest.approx(shares)


def test_when_a_version_is_due() -> None:
    due = {
        Synchronous(): [(1, 0), (5, 0)],
        FedAsync(): [(1, 0), (1, 3), (5, 0)],
        FedBuff(5): [(5, 0)],
        Periodic(): [],
    }
    for rule, cases in due.items():
        asked = ((0, 0), (0, 3), (1, 0), (1, 3), (5, 0))
        assert [c for c in asked if rule.is_due(*c)] == cases, rule


@pytest.mark.parametrize("rule", [Synchronous(), Synchronous("participants"), Periodic()], ids=str)
def test_updates_without_any_weight_are_one_sentence(rule: Rule) -> None:
    with pytest.raises(ThinwireError, match="clients 4, 5 have no weight together; give each some samples"):
        rule.shares([ArrivedUpdate(4, 1, 0), ArrivedUpdate(5, 1, 0)], ALL)


def test_a_discount_beyond_all_floats_is_nothing() -> None:
    assert FedAsync(a=1000.0).shares([ArrivedUpdate(0, 1, 5, staleness=9)], ALL) == [0.0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Synchronous("all"), "scaling='all' is not one of answered, participants"),
        (lambda: Synchronous(rate=0.0), "rate=0.0 is not above 0"),
        (lambda: FedAsync(0.0), "alpha=0.0 is not in"),
        (lambda: FedAsync(a=-1.0), "a=-1.0 is below 0"),
        (lambda: FedBuff(0), "size=0 is no number of updates"),
        (lambda: Periodic(0.0), "seconds=0.0 is not above 0"),
        (lambda: Periodic(weights="bytes"), "weights='bytes' is not one of samples, equal"),
        (lambda: Decay(0.0), "first=0.0 is no step size"),
        (lambda: Decay(decay=-1.0), "decay=-1.0 is below 0"),
    ],
)
def test_impossible_rules_are_refused(make: type, text: str) -> None:
    with pytest.raises(InputError, match=text):
        make()


def test_fedasync_mixes_in_the_model_that_a_client_ends_at() -> None:
    federation = Federation(FedAsync(0.8, a=0.5))
    server = federation.server
    start = server.weights
    late = federation.update(1)
    taken(server.receive(0, federation.update(0)))
    before = server.weights
    receipt = taken(server.receive(1, late))
    assert (receipt.staleness, receipt.version) == (1, 2)
    ended = start - unpack_row(Update.unpack(late).packet, start.numel(), 1)
    share = 0.8 * 2**-0.5
    torch.testing.assert_close(server.weights, (1 - share) * before + share * ended, atol=1e-6, rtol=0)


def test_the_published_scaling_takes_a_smaller_step_where_some_are_missing() -> None:
    steps = {}
    for scaling in ("answered", "participants"):
        server = (federation := Federation(Synchronous(scaling))).server
        start = server.weights
        server.begin([0, 2])
        data = federation.update(0)
        taken(server.receive(0, data))
        assert server.close() == 1
        change = unpack_row(Update.unpack(data).packet, start.numel(), 0)
        steps[scaling] = float(((start - server.weights) / change).median())
    expected = len(SIZES) / 2 * SIZES[0] / sum(SIZES)
    assert steps == pytest.approx({"answered": 1.0, "participants": expected}, rel=1e-3)


def test_a_period_makes_one_version_of_what_came() -> None:
    server = (federation := Federation(Periodic())).server
    assert server.close() is None and server.version == 0
    for client in (2, 0):
        assert taken(server.receive(client, federation.update(client))).version is None
    assert server.waiting == 2 and server.close() == 1 and server.waiting == 0


def test_a_sum_is_rounded_once() -> None:
    weights = torch.tensor([[1.0, 2.0**24]])
    small = torch.tensor([[2.0**-30, -1.0]])
    assert (weights - summed(weights, [(1.0, small)] * 2)).float().tolist() == [[1.0, 2.0**24 + 2]]


def test_rates_fall_as_planned() -> None:
    rates = Decay(0.03, decay=0.1, horizon=50)
    assert [rates.at(v) for v in (0, 10)] == pytest.approx([0.03, 0.015])
    assert rates.last == pytest.approx(0.005) and Decay(RATE).last == RATE
