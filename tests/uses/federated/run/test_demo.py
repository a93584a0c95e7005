"""``thinwire demo federated``: what it runs, and what it says where its data are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.runs.data import debian, fashion
from thinwire.uses.federated.commands.demo import FEDERATED_DEMO
from thinwire.uses.federated.recipes import parse_federated_recipe
from thinwire.uses.federated.run.fleet import load_fleet
from thinwire.uses.federated.run.options import FederatedConfig


def test_it_runs_three_published_methods_and_ours_to_one_accuracy() -> None:
    config = FederatedConfig.from_dict(FEDERATED_DEMO)
    assert config.ways == ["fedavg", "fedbuff", "fedluck", "thinwire"]
    assert all(parse_federated_recipe(name).policy for name in config.ways)
    assert (config.until, config.budget_seconds, config.every_seed) == (0.78, 3600.0, [0])
    rates = sorted(device.link.uplink.mean * 8 / 1e3 for device in load_fleet(config.devices).devices)
    assert len(rates) == config.clients == 10 and rates[0] < 20 == rates[1] and rates[-1] == 60


def test_where_the_data_cannot_be_fetched_one_sentence_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fashion, "PACKAGED", tmp_path / "packaged")
    monkeypatch.setattr(debian, "UPSTREAM", "http://127.0.0.1:9")
    monkeypatch.setenv("PATH", str(tmp_path))  # without apt
    places = {"THINWIRE_DATA": str(tmp_path), "THINWIRE_CACHE": str(tmp_path), "NO_COLOR": "1"}
    out = tmp_path / "a" / "out"
    result = CliRunner(env=places).invoke(app, ["demo", "federated", "--out", str(out), "--json"])
    assert result.exit_code == 2 and result.stdout == ""
    (refused,) = result.stderr.splitlines()
    assert refused.startswith("thinwire: this machine has no apt-get") and "THINWIRE_DATA" in refused
    assert not out.parent.exists()
