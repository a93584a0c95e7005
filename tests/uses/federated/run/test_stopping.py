"""When a run ends: a target counts by all held-out samples, and a rule that ends it sooner is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each

from thinwire.runs.records.run_record import RecipeText
from thinwire.types import InputError
from thinwire.uses.federated.run import federated_setup
from thinwire.uses.federated.run.comparison import run_all
from thinwire.uses.federated.run.options import MOST_ROUNDS, ROUNDS, FederatedConfig, ServeConfig
from thinwire.uses.federated.run.record import FederatedRecord
from thinwire.uses.kinds import load_run

HELD_OUT, LOOKED_AT = 300, 30


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Held-out samples by class, of which a model on its way names the first ones right, and few others."""
    draw, file = np.random.default_rng(0), tmp_path_factory.mktemp("sorted") / "sorted.npz"
    y = np.concatenate([np.zeros(300, np.int64), draw.integers(0, 4, 60)])
    x = np.eye(8, dtype=np.float32)[y] + draw.normal(size=(len(y), 8)).astype(np.float32) / 2
    held = np.sort(draw.integers(0, 4, HELD_OUT))
    test = np.eye(8, dtype=np.float32)[held] + draw.normal(size=(HELD_OUT, 8)).astype(np.float32) / 2
    np.savez(file, x_train=x, y_train=y, x_test=test, y_test=held)
    return file


def run(data: Path, out: Path, **options: Any) -> Any:
    given = {"data": str(data), "methods": "fedavg", "model": "logistic", "clients": 3, "workers": 1}
    config = FederatedConfig.from_dict(given | {"out": str(out), "quiet": True} | options)
    return load_run(run_all(config, lambda *_: None)[0])


@each("until", [0.3, 0.4, 0.5, 0.6, 0.9])
def test_a_target_is_reached_by_all_held_out_samples(
    until: float, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(federated_setup, "LOOKED_AT", LOOKED_AT)
    record = run(data, tmp_path, until=until, rounds=8)
    last = record.accuracy.curve[-1]
    if record.target is None:
        assert record.accuracy.final < until and "--rounds, 8, ended it" in record.unreached
    else:
        assert record.accuracy.final == last.accuracy >= until and record.unreached == ""
    assert abs(record.accuracy.best * HELD_OUT - round(record.accuracy.best * HELD_OUT)) < 1e-4


@each(
    "options",
    [
        ({"budget": "90s"}, MOST_ROUNDS, "--budget 90s ended it"),
        ({"budget": "90s", "rounds": 2}, 2, "--rounds, 2, ended it"),
        ({}, ROUNDS, "--rounds, 100, ended it"),
    ],
)
def test_the_rule_that_ended_a_run_is_named(options: Any, data: Path, tmp_path: Path) -> None:
    given, versions, said = options
    record = run(data, tmp_path, until=1.0, **given)
    assert FederatedConfig.from_dict(given).versions == versions and said in record.unreached
    made = record.totals["rounds"]
    assert made == versions or (made > ROUNDS and record.totals["virtual_s"] == 90)


def test_a_decay_wants_to_know_of_how_many_versions() -> None:
    with pytest.raises(InputError, match="give --rounds too"):
        FederatedConfig(budget="1h", decay=0.1)


def test_a_server_on_a_port_has_no_virtual_clock_to_end_by() -> None:
    with pytest.raises(InputError, match="budget 3s is of a virtual clock"):
        ServeConfig(budget="3s")


@each("odd", [{"target": {}}, {"deployment": {"identical": False}}])
def test_a_record_that_lacks_what_a_report_shows_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"of a federated record lacks .*; run it again"):
        FederatedRecord(recipe=RecipeText("fedavg"), **odd)
