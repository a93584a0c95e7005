"""Commands fetch what they need: data and models by their names, before anything else is begun."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from each import each
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.runs.models import fetch
from thinwire.types import InputError

TEXT, CLOTHES = {"smollm2-135m", "shakespeare"}, {"fashion-mnist"}


@each(
    "arguments, wanted",
    [
        (["train"], TEXT),
        (["compare", "fp32", "thinwire"], TEXT),
        (["demo"], TEXT),
        (["demo", "replicas"], {"gpt2-lab", "shakespeare"}),
        (["demo", "state"], TEXT),
        (["demo", "models"], TEXT),
        (["demo", "federated"], CLOTHES),
        (["train", "--model", "cnn-fashion", "--data", "fashion-mnist", "--stages", "1", "--replicas", "2"],
         CLOTHES | {"cnn-fashion"}),
        (["plan", "--measure"], {"smollm2-135m"}),
        (
            ["pack", "smollm2-135m", "-o", "x.tw", "--target", "50MB", "--calibration-data", "shakespeare"],
            TEXT,
        ),
        (["federate", "fedavg"], CLOTHES),
        (["federate-serve"], CLOTHES),
        (["federate-join", "127.0.0.1:1", "--data", "fashion-mnist"], CLOTHES),
    ],
)  # fmt: skip
def test_each_command_asks_for_what_it_needs_first(
    arguments: list[str], wanted: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(names: Iterable[str], told: object) -> None:
        raise InputError(f"needs {' '.join(sorted(names))}")

    monkeypatch.setattr(fetch, "fetch_missing", absent)
    monkeypatch.chdir(tmp_path)
    result = CliRunner(env={"RANK": "0"}).invoke(app, arguments)
    assert result.output.splitlines()[-1] == f"thinwire: needs {' '.join(sorted(wanted))}"
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_what_is_known_and_absent_is_fetched_once_and_names_of_files_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here: set[str] = set()

    def make(told) -> Path:  # type: ignore[no-untyped-def]
        here.add("clothes")
        return tmp_path

    monkeypatch.undo()
    monkeypatch.setattr(fetch, "THINGS", {"clothes": fetch.Thing(lambda: "clothes" in here, make)})
    fetch.fetch_missing(["my/texts", "clothes"])
    assert here == {"clothes"}
    monkeypatch.setitem(fetch.THINGS, "clothes", fetch.Thing(lambda: True, lambda told: 1 / 0))
    fetch.fetch_missing(["clothes", "clothes"])
