"""The study of federated claims: searches that no end of a grid wins, and traffic that is fitted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from bench.federated.decided import GROUPS, SEARCHED, SEEDS, Cell, cells, config_of, next_try
from bench.federated.watched import watching

from bench.federated import decided
from thinwire.codecs import HardThreshold, TopK
from thinwire.rounds.residuals import ClientResiduals
from thinwire.uses.federated.recipes import parse_federated_recipe


def run(seconds: float | None, share: float = 0.0, diverged: str | None = None) -> dict[str, object]:
    target = None if seconds is None else {"virtual_s": seconds}
    sent = {"up": share, "raw_up": 1.0}
    own = {"target": target, "bytes": sent, "diverged": diverged, "accuracy": {"final": 0.7}}
    return own | {"until": 0.78}


class Kept:
    """Finished cells: a method is soonest at a step size of 0.8, and sends less the higher its threshold."""

    def __init__(self) -> None:
        self.known: dict[Cell, dict[str, object]] = {}

    def get(self, cell: Cell) -> dict[str, object] | None:
        return self.known.get(cell)

    def finish(self, cell: Cell) -> None:
        x = cell.method.partition("threshold=")[2]
        share = 1e-4 / float(x) if x else 0.0
        self.known[cell] = run(100 + abs(cell.rate - 0.8), share, "ran away" if cell.rate > 1 else None)


def through(found: Iterator[Cell], kept: Kept) -> list[Cell]:
    """Finish cells as they are asked for, as a study does."""
    made = list[Cell]()
    for cell in found:
        if kept.get(cell) is None:
            kept.finish(cell)
            made.append(cell)
    return made


@pytest.mark.parametrize(("group", "label"), [("luck", "fedbuff"), ("cnn-3", "gamma")])
def test_a_search_goes_on_until_both_sides_are_worse(
    group: str, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept()
    monkeypatch.setattr(decided, "KEPT", kept)
    assert decided.settled(group, label) is None
    made = through(decided.search(group, label), kept)
    best = decided.settled(group, label)
    assert best and best.rate == pytest.approx(0.8)
    assert {c.rate for c in made} >= {0.4, 0.8, 1.6} and {c.seed for c in made} == set(SEARCHED)
    if label == "gamma":  # and its threshold sends what it should
        share = GROUPS[group].share
        assert 1e-4 / float(best.method.partition("threshold=")[2]) == pytest.approx(share, rel=0.06)


def test_a_fit_is_given_up_where_nothing_follows() -> None:
    points = [(0.01, 0.5)]
    while (x := next_try(points, 0.1)) is not None:
        points.append((x, 0.5))
    assert len(points) == decided.TRIES and next_try([(0.3, 0.102)], 0.1) is None


def test_every_cell_can_be_run_and_no_seed_of_a_search_is_reported() -> None:
    assert not set(SEARCHED) & set(SEEDS) and len(SEEDS) >= 10
    every = list(cells())
    assert {c.group for c in every} == set(GROUPS) and len(every) == len(set(every))
    for cell in every:
        parse_federated_recipe(cell.method)
        config_of(cell, "out").validate()
    assert {config_of(c, "out").steps for c in every if c.group.startswith(("skew", "power"))} == {10}
    for group in ("luck", "luck-counted"):
        options = [config_of(c, "out") for c in every if c.group == group]
        assert {(o.downlink, o.batch) for o in options} == {
            ("free", 64) if group == "luck" else ("counted", 20)
        }


def test_what_clients_hold_back_is_told_beside_the_threshold() -> None:
    with watching() as watch:
        residuals = ClientResiduals()
        for turn, level in ((1, 2.0), (2, 4.0)):
            for client in (0, 1):
                residuals.encode(client, turn, torch.tensor([[1.0, 3.0]]), HardThreshold(level))
                residuals.settle(client, turn)
        residuals.encode(2, 1, torch.tensor([[1.0, 3.0]]), TopK(0.5))
    # first 1 and 0 are left, then 2 and 3
    assert watch.points() == [[1.0, 2.0, pytest.approx(0.5**0.5)], [2.0, 4.0, pytest.approx(6.5**0.5)]]
