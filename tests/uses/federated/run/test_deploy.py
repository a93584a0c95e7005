"""Federations in real processes: the bits and seconds of the virtual clock, crashes, and what is refused."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launchers import Command, sentence, warm

from thinwire.runs.records.writer import read_json
from thinwire.uses.doctor.run.diagnosis import OK, emulation

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn's digits")
LONG = 120.0  # seconds; a limit, not an expectation
SMALL = ("--data", "digits", "--model", "logistic", "--clients", "2", "--steps", "2")


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Any]:
    """Return what starts a command, and lets none live on after the test."""
    begun: list[Command] = []

    def start(*words: str) -> Command:
        begun.append(warm().start(tmp_path / f"program-{len(begun)}", *words))
        return begun[-1]

    yield start
    for program in begun:
        if program.poll() is None:
            program.end(signal.SIGKILL)


@pytest.mark.parametrize("method", ["fedavg", "thinwire:period=0.5"])
def test_real_processes_come_to_the_weights_of_one(method: str, tmp_path: Path) -> None:
    more = ("--rounds", "3", "--deploy", "processes", "--workers", "1", "--json", "--out", tmp_path / "out")
    done = warm().run(tmp_path, "federate", method, *SMALL, *more)
    assert done.code == 0, done.err
    deployment = json.loads(done.out)[0]["deployment"]
    assert deployment["identical"] is True
    assert deployment["check"] == ("simulated" if method == "fedavg" else "turns done again")
    assert len(deployment["seconds"]) == 3


@pytest.mark.serial
def test_over_an_emulated_link_rounds_take_as_long_as_foretold(tmp_path: Path) -> None:
    found = emulation()
    if found.status != OK:
        pytest.skip(f"no emulated network here: {found.finding}")
    words = ("--data", "digits", "--model", "cnn", "--clients", "2", "--steps", "2", "--rounds", "2")
    more = ("--deploy", "processes", "--emulate", "--link", "1mbit,50ms", "--workers", "1", "--json")
    done = warm().run(tmp_path, "federate", "fedavg", *words, *more, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    deployment = json.loads(done.out)[0]["deployment"]
    assert deployment["identical"] is True
    assert 0.85 < deployment["ratio"] < 1.15


def test_a_server_that_was_killed_goes_on_from_its_last_version(programs: Any, tmp_path: Path) -> None:
    out = str(tmp_path / "served")
    serve = ("federate-serve", *SMALL, "--method", "fedavg", "--out", out, "--rounds", "400")
    server = programs(*serve, "--port", "0")
    port = server.says(r"127.0.0.1:(\d+)")[1]
    clients = [
        programs("federate-join", f"127.0.0.1:{port}", "--data", "digits", "--part", f"{i}/2") for i in (0, 1)
    ]
    server.says(r"version 2 after")
    server.end(signal.SIGKILL)
    last = 3 + json.loads((tmp_path / "served" / "metrics.jsonl").read_text().splitlines()[-1])["version"]
    again = programs(*serve, "--port", port, "--resume", "--rounds", str(last))
    assert again.wait() == 0, again.err
    assert [client.wait() for client in clients] == [0, 0]
    versions = [
        json.loads(line)["version"]
        for line in (tmp_path / "served" / "metrics.jsonl").read_text().splitlines()
    ]
    assert versions == sorted(set(versions)) and versions[-1] == last
    record = read_json(tmp_path / "served" / "run.json")
    assert record["totals"]["rounds"] == last and record["clients"][0]["samples"] == 719


def test_what_does_not_fit_is_refused_in_a_sentence(programs: Any, tmp_path: Path) -> None:
    server = programs("federate-serve", *SMALL, "--port", "0", "--out", str(tmp_path / "served"))
    address = server.says(r"(127.0.0.1:\d+)")[1]
    strange = tmp_path / "strange.npz"
    x, y = np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1])
    np.savez(strange, x_train=x, y_train=y, x_test=x, y_test=y)
    for words, told in (
        (("--data", str(strange)), "give the same kind of data"),
        (("--data", "digits", "--model", "cnn"), "give the same --model"),
    ):
        done = warm().run(tmp_path, "federate-join", address, *words)
        assert done.code == 2 and told in sentence(done), done.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("federate-serve", "--method", "fedavgg"), "fedavg"),
        (("federate-serve", "--host", "0.0.0.0"), "token"),
        (("federate-serve", "--config", "split = 'iid'"), "has 'split', which this command does not use"),
        (("federate-serve", "--config", "methods = 'fedavgg'"), "did you mean fedavg"),
        (("federate-join", "127.0.0.1:1", "--split", "classes:2"), "give --part too"),
        (("federate-join", "nowhere"), "is not HOST:PORT"),
        (("federate-join", "127.0.0.1:1", "--part", "3/3"), "--part 3/3 is not K/N with K below N"),
        (("federate-join", "192.0.2.7:7300"), "token"),
        (("federate", "fedavg", "--link", "1mbit"), "add --deploy processes"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    out, file = tmp_path / "out", tmp_path / "options.toml"
    if "--config" in words:
        file.write_text(words[-1])
        words = (*words[:-1], str(file))
    more = ("--out", str(out)) if words[0] != "federate-join" else ()
    done = warm().run(tmp_path, *words, *more)
    assert (done.code, told in sentence(done), out.exists()) == (2, True, False), done.err


def test_a_client_gives_up_on_a_server_that_is_not_there(tmp_path: Path) -> None:
    began = time.monotonic()
    done = warm().run(tmp_path, "federate-join", "127.0.0.1:9", "--data", "digits", "--patience", "1")
    assert (done.code, "no sign of 127.0.0.1:9" in done.err) == (3, True), done.err
    assert time.monotonic() - began < LONG
