"""``thinwire federate`` end to end: records, the report, the same bits in any processes, wrong inputs."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from launchers import Command, sentence, warm

from thinwire.lab.engines import load_run

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn's digits")
SMALL = ("--data", "digits", "--model", "logistic", "--rounds", "4", "--clients", "6", "--lr", "0.1")


def federate(place: Path, *arguments: str) -> Command:
    return warm().run(place, "federate", *arguments, "--out", place / "out")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Path]:
    place = tmp_path_factory.mktemp("federated")
    command = federate(place, "fedavg", "thinwire:period=2", "fedbuff:size=3", *SMALL, "--until", "0.5",
                       "--split", "dirichlet:1.0", "--workers", "1", "--json")  # fmt: skip
    assert command.code == 0, command.err
    return command, place / "out"


def test_each_method_leaves_a_record(done: tuple[Command, Path]) -> None:
    command, out = done
    records: list[dict[str, Any]] = json.loads(command.out)
    assert records == json.loads((out / "compare.json").read_text())
    for r, name in zip(records, ("fedavg", "thinwire:period=2", "fedbuff:size=3"), strict=True):
        assert (r["kind"], r["status"], r["recipe"]["name"], r["seed"]) == ("federated", "done", name, 0)
        assert 0 < r["totals"]["rounds"] <= 4 and r["totals"]["virtual_s"] > 0
        assert r["bytes"]["up"] == sum(c["up"] for c in r["clients"])
        assert sum(map(sum, r["counts"])) == sum(c["samples"] for c in r["clients"])
        assert len(r["weights"]) == 64 and 0 < r["accuracy"]["final"] <= 1
        if r["target"]:
            assert r["target"]["accuracy"] == 0.5 <= r["accuracy"]["best"]
    dense, ours = records[0], records[1]
    assert dense["bytes"]["up"] == pytest.approx(dense["bytes"]["raw_up"], rel=0.05)
    assert ours["bytes"]["up"] < ours["bytes"]["raw_up"]
    assert load_run(out / "fedavg").kind == "federated"


def test_more_processes_come_to_the_same_bits(done: tuple[Command, Path], tmp_path: Path) -> None:
    command, _ = done
    again = federate(
        tmp_path, "fedavg", *SMALL, "--until", "0.5", "--split", "dirichlet:1.0", "--workers", "2", "--json"
    )
    assert again.code == 0, again.err
    assert json.loads(again.out)[0]["weights"] == json.loads(command.out)[0]["weights"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fedavgg",), "no recipe 'fedavgg'; did you mean fedavg"),
        (("fedavg", "--split", "dirichlet:0"), "alpha"),
        (("fedavg", "--split", "classes:11"), "classes"),
        (("fedavg", "--participate", "20"), "--participate is 20 of --clients 6"),
        (("fedavg-topk:ratio=0",), "ratio"),
        (("fedavg", "--clients", "5000"), "more than the"),
        (("fedavg", "--devices", "nine"), "--devices 'nine' is unknown"),
        (("fedavg", "--budget", "soon"), "--budget soon is no time"),
        (("fedavg", "--seeds", "a"), "--seeds a are no numbers"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    command = federate(tmp_path, arguments[0], *SMALL, *arguments[1:])
    assert command.code == 2 and said in sentence(command)
    assert not list(tmp_path.glob("out/**/run.json"))
