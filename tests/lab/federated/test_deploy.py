"""Federations in real processes: the bits and seconds of the virtual clock, crashes, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from thinwire.lab.doctor.diagnosis import OK, emulation
from thinwire.lab.records.writer import read_json

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn's digits")
SMALL = ("--data", "digits", "--model", "logistic", "--clients", "2", "--steps", "2")
PATIENCE = 60.0


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "thinwire", *words]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=PATIENCE)


class Program:
    """A command that goes on in the background; ``until`` waits for a line of its stderr."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        self.said: list[str] = []

    def until(self, pattern: str) -> re.Match[str]:
        stream = self.process.stderr
        assert stream is not None
        for line in stream:
            self.said.append(line)
            found = re.search(pattern, line)
            if found:
                return found
        raise AssertionError("".join(self.said))

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, "".join(self.said) + err


@pytest.fixture
def programs() -> Iterator[Any]:
    with ExitStack() as stack:

        def start(*words: str) -> Program:
            program = Program(*words)
            stack.enter_context(program.process)  # which waits, and closes its pipe
            stack.callback(program.process.kill)
            return program

        yield start


@pytest.mark.parametrize("method", ["fedavg", "thinwire:period=0.5"])
def test_real_processes_come_to_the_weights_of_one(method: str, tmp_path: Path) -> None:
    done = run(
        "federate",
        method,
        *SMALL,
        "--rounds",
        "3",
        "--deploy",
        "processes",
        "--out",
        str(tmp_path),
        "--json",
        "--workers",
        "1",
    )
    assert done.returncode == 0, done.stderr
    deployment = json.loads(done.stdout)[0]["deployment"]
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
    done = run("federate", "fedavg", *words, *more, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    deployment = json.loads(done.stdout)[0]["deployment"]
    assert deployment["identical"] is True
    assert 0.85 < deployment["ratio"] < 1.15


def test_a_server_that_was_killed_goes_on_from_its_last_version(programs: Any, tmp_path: Path) -> None:
    out = str(tmp_path / "served")
    serve = ("federate-serve", *SMALL, "--method", "fedavg", "--out", out, "--rounds", "400")
    server = programs(*serve, "--port", "0")
    port = server.until(r"127.0.0.1:(\d+)")[1]
    clients = [
        programs("federate-join", f"127.0.0.1:{port}", "--data", "digits", "--part", f"{i}/2") for i in (0, 1)
    ]
    server.until(r"version 2 after")
    server.process.kill()
    server.process.wait()
    last = 3 + json.loads((tmp_path / "served" / "metrics.jsonl").read_text().splitlines()[-1])["version"]
    again = programs(*serve, "--port", port, "--resume", "--rounds", str(last))
    code, said = again.end()
    assert code == 0, said
    assert [client.end()[0] for client in clients] == [0, 0]
    versions = [
        json.loads(line)["version"]
        for line in (tmp_path / "served" / "metrics.jsonl").read_text().splitlines()
    ]
    assert versions == sorted(set(versions)) and versions[-1] == last
    record = read_json(tmp_path / "served" / "run.json")
    assert record["totals"]["rounds"] == last and record["clients"][0]["samples"] == 719


def test_what_does_not_fit_is_refused_in_a_sentence(programs: Any, tmp_path: Path) -> None:
    server = programs("federate-serve", *SMALL, "--port", "0", "--out", str(tmp_path / "served"))
    address = server.until(r"(127.0.0.1:\d+)")[1]
    strange = tmp_path / "strange.npz"
    import numpy as np

    x, y = np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1])
    np.savez(strange, x_train=x, y_train=y, x_test=x, y_test=y)
    for words, told in (
        (("--data", str(strange)), "give the same kind of data"),
        (("--data", "digits", "--model", "cnn"), "give the same --model"),
    ):
        done = run("federate-join", address, *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert told in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("federate-serve", "--method", "fedavgg"), "fedavg"),
        (("federate-serve", "--host", "0.0.0.0"), "token"),
        (("federate-join", "nowhere"), "is not HOST:PORT"),
        (("federate-join", "127.0.0.1:1", "--part", "3/3"), "--part 3/3 is not K/N with K below N"),
        (("federate-join", "192.0.2.7:7300"), "token"),
        (("federate", "fedavg", "--link", "1mbit"), "add --deploy processes"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    more = ("--out", str(out)) if words[0] != "federate-join" else ()
    done = run(*words, *more)
    assert (done.returncode, told in done.stderr, out.exists()) == (2, True, False), done.stderr


def test_a_client_gives_up_on_a_server_that_is_not_there() -> None:
    began = time.monotonic()
    done = run("federate-join", "127.0.0.1:9", "--data", "digits", "--patience", "1")
    assert (done.returncode, "no sign of 127.0.0.1:9" in done.stderr) == (3, True), done.stderr
    assert time.monotonic() - began < 2 * PATIENCE  # one second, and the start of a process
