"""``thinwire federate`` end to end: records, the report, the same bits in any processes, wrong inputs."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from launchers import Command, record, sentence, warm

from thinwire.uses.kinds import load_run

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn's digits")
SMALL = ("--data", "digits", "--model", "logistic", "--rounds", "4", "--clients", "6", "--lr", "0.1")


def federate(place: Path, *arguments: str | Path, **environment: str) -> Command:
    where = () if "--out" in arguments else ("--out", place / "out")
    return warm().run(place, "federate", *arguments, *where, **environment)


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
    for c in ours["clients"]:  # what its policy lets it send, whatever a value takes
        assert 0 < c["ratio"] < 0.035 and c["steps"] > 0
    assert all(0 < p["density"] < 0.035 for p in ours["accuracy"]["curve"])
    assert all(0.9 < p["density"] <= 1 for p in dense["accuracy"]["curve"])
    assert load_run(out / "fedavg").kind == "federated"


def test_a_method_comes_to_the_same_bits_alone_and_in_more_processes(
    done: tuple[Command, Path], tmp_path: Path
) -> None:
    command, _ = done
    again = federate(
        tmp_path,
        "fedbuff:size=3",
        *SMALL,
        "--until",
        "0.5",
        "--split",
        "dirichlet:1.0",
        "--workers",
        "2",
        "--json",
    )
    assert again.code == 0, again.err
    (*_, one), (two,) = json.loads(command.out), json.loads(again.out)
    assert two["weights"] == one["weights"] and two["accuracy"] == one["accuracy"]
    assert [len(run["memory"]["peak_rss_bytes"]) for run in (one, two)] == [1, 3]  # of all processes


def test_a_method_that_diverges_takes_nothing_from_the_others(tmp_path: Path) -> None:
    command = federate(tmp_path, "thinwire", "fedavg:steps=1", *SMALL, "--lr", "100", "--model", "cnn",
                       "--rounds", "1", "--workers", "1")  # fmt: skip
    assert command.code == 3
    diverged, done = (record(tmp_path / "out" / name) for name in ("thinwire", "fedavg-steps1"))
    assert (diverged["status"], done["status"]) == ("failed", "done")
    assert [r["status"] for r in json.loads((tmp_path / "out" / "compare.json").read_text())] == [
        "failed",
        "done",
    ]
    (said,) = [line for line in command.err.splitlines() if line.startswith("thinwire: ")]
    assert said == f"thinwire: thinwire failed, 1 of 2 runs finished: {diverged['notes'][-1]}"
    assert "training diverged at local step" in said and "lower the rate 100" in said
    assert command.out.count("failed") == 1 and (tmp_path / "out" / "report.html").exists()


def test_a_client_that_raises_ends_its_method_at_once_and_is_named(tmp_path: Path) -> None:
    command = federate(
        tmp_path, "fedavg:steps=2", "fedavg:steps=4", *SMALL, "--model", "wayward:model", "--batch", "10",
        "--rounds", "2", "--workers", "1", "--json",
    )  # fmt: skip
    assert command.code == 3
    said = "fedavg:steps=4 failed, 1 of 2 runs finished: client 1, version 0: training raised RuntimeError: "
    assert sentence(command) == f"{said}out of ideas at local step 3"
    good, bad = json.loads(command.out)
    assert good["status"] == "done" and good["totals"]["rounds"] == 2
    assert bad["status"] == "failed" and bad["totals"]["rounds"] == 0 and "client 1" in bad["notes"][-1]
    assert bad["totals"]["seconds"] < 60
    report = (tmp_path / "out" / "report.html").read_text()
    assert "fedavg:steps=4 did not finish (failed)" in report and "out of ideas" in report


@pytest.mark.parametrize("method", ["fedavg", "fedbuff:size=2", "thinwire"])
def test_where_nobody_answers_the_clients_are_named(method: str, tmp_path: Path) -> None:
    (tmp_path / "lost.toml").write_text("[[device]]\ncount = 6\nstep_seconds = 0.1\ndrop_out = 0.999999\n")
    command = federate(tmp_path, method, *SMALL, "--devices", tmp_path / "lost.toml", "--workers", "1")
    assert command.code == 3
    said = [line for line in command.err.splitlines() if line.startswith("thinwire: ")]
    assert len(said) == 1 and "of clients 0, 1, 2, 3, 4, 5; look at their drop_out" in said[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fedavgg",), "no recipe 'fedavgg'; did you mean fedavg"),
        (("fedavg", "thinwire:perod=2"), "recipe thinwire has no parameter 'perod'; it takes period"),
        (("fedavg", "fedavg"), "the methods name fedavg twice"),
        (("fedavg-topk:ratio=0",), "ratio=0.0 is not a number in 1e-06..1"),
        (("fedavg-topk:ratio=1.01",), "ratio=1.01 is not a number in 1e-06..1"),
        (("fedavg", "--split", "dirichlet:0"), "has alpha 0; give a number above 0"),
        (("fedavg", "--split", "dirichlet:-0.5"), "has alpha -0.5; give a number above 0"),
        (("fedavg", "--split", "classes:11"), "digits has 10 classes; give at most as many"),
        (("fedavg", "--split", "classes:1"), "6 clients leave out some of the 10 classes"),
        (("fedavg", "--split", "skew:100000"), "leaves the smallest of 6 clients"),
        (("fedavg", "--split", "speaker"), "digits names no speakers"),
        (("fedavg", "--participate", "20"), "--participate is 20 of --clients 6"),
        (("fedavg", "--clients", "5000"), "5000 clients are more than the 1438 samples of digits"),
        (("fedavg", "--devices", "nine"), "--devices 'nine' is unknown"),
        (("fedavg", "--devices", "DEVICES"), "has an unknown 'step_second'; did you mean step_seconds"),
        (("fedavg", "--devices", "ten-one-straggler"), "has 10 devices, not 6; give --clients 10"),
        (("fedavg", "--data", "digit"), "--data 'digit' is unknown; did you mean digits"),
        (("fedavg", "--budget", "soon"), "--budget soon is no time"),
        (("fedavg", "--seeds", "a"), "--seeds a are no numbers below a billion"),
        (("fedavg", "--seeds", "1,1"), "--seeds name 1 twice"),
        (("fedavg", "--model", "resnet"), "--model 'resnet' is unknown"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "devices.toml"
    file.write_text("[[device]]\ncount = 6\nstep_second = 1\n")
    words = [str(file) if word == "DEVICES" else word for word in arguments]
    names = [word for word in words[:2] if not word.startswith("--")]
    command = federate(tmp_path, *names, *SMALL, *words[len(names) :])
    assert command.code == 2 and said in sentence(command) and command.out == ""
    assert not (tmp_path / "out").exists()


def test_what_is_refused_costs_no_earlier_report(done: tuple[Command, Path]) -> None:
    place = done[1].parent
    before = {file: file.read_bytes() for file in done[1].rglob("*") if file.is_file()}
    assert federate(place / "again", "fedavg", "fedavgg", *SMALL, "--out", done[1]).code == 2
    assert {file: file.read_bytes() for file in done[1].rglob("*") if file.is_file()} == before
