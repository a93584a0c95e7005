"""Ranks that run a program by name: what they say, what they are told, whom their failures name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from launchers import forked, gone
from played import LONG, Two

from thinwire.runs.ranks import rank_main, supervise
from thinwire.runs.ranks.launcher import LocalLauncher, _command
from thinwire.runs.ranks.rank_main import CONFIG
from thinwire.runs.ranks.supervise import Workers
from thinwire.types import InputError, LinkError, ThinwireError
from thinwire.uses.federated.run import trainer

PROGRAM = "played:play"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Start two ranks, which hear one order each."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    def begin(workers: Workers, *orders: str) -> None:
        for order in orders:
            workers.order(workers.start(Two(seed=5, out=str(tmp_path))), f"do {order}")

    return begin


def test_ranks_take_orders_and_say_what_happens(start: Any) -> None:
    with LocalLauncher() as place, Workers(place, PROGRAM) as workers:
        start(workers, "echo a b")
        assert workers.until("ready", 0)["seed"] == 5
        rank, said = workers.hear(LONG)
        assert (rank, said["kind"], said["text"]) == (0, "echo", ["a", "b"]) and said["at"] <= time.time()
        workers.wait(LONG)
        assert workers.processes[0].returncode == 0
        with pytest.raises(LinkError, match=r"^no process said anything for 0\.01 s; see their logs$"):
            workers.hear(0.01)
        with pytest.raises(
            LinkError, match=r"^rank 0 did not get to .more. within 0\.01 s; its messages are above$"
        ):
            workers.until("more", 0, 0.01)


def test_ranks_of_commands_that_tests_start_are_forks_of_these() -> None:
    """Those have imported all; for that alone a process takes seconds, the suite half as long again."""
    for module in (*_command(Two(), PROGRAM)[2:3], trainer.WORKER, "thinwire"):
        assert forked([sys.executable, "-m", module, PROGRAM]) == [module, PROGRAM]
        assert find_spec(module) is not None
    assert not forked([sys.executable, "-m", "http.server"])


FAILURES = [
    (("link rank 1 is lost", "input --x is 3; give 4"), (), InputError, "^--x is 3; give 4$"),
    (("wait", "input --x is 3"), ("first", "other"), InputError, "^the other process: --x is 3$"),
    (
        ("wait", "odd odd thing"),
        (),
        ThinwireError,
        r"^rank 1 failed \(ValueError: odd thing\); THINWIRE_DEBUG=1",
    ),
    (("wait", "leave"), (), ThinwireError, "^rank 1 failed with exit code 7; its messages are above$"),
]


@pytest.mark.parametrize(("orders", "names", "kind", "words"), FAILURES, ids=["cause", "name", "odd", "mute"])
def test_the_failure_that_tells_most_is_raised(
    start: Any, orders: tuple[str, ...], names: tuple[str, ...], kind: type[Exception], words: str
) -> None:
    begun = time.monotonic()
    with (
        pytest.raises(kind, match=words),
        LocalLauncher() as place,
        Workers(place, PROGRAM, names) as workers,
    ):
        start(workers, *orders)
        workers.wait(LONG)
    assert [p.poll() is not None for p in workers.processes] == [True, True]
    assert time.monotonic() - begun < LONG


def test_any_rank_whose_card_is_full_says_so_and_its_starter_hears_of_bad_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", CONFIG: json.dumps(Two().to_dict())}.items():
        monkeypatch.setenv(name, value)
    name, text, code = rank_main._run("played:filled", "played:Two")
    assert (name, code) == ("InputError", 2)
    assert text.startswith("rank 1: cuda:1 is full: 2.00 GiB more were needed; take a smaller")


def test_a_killed_rank_is_named_with_a_remedy(start: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(LinkError, match=r"^the second one process was ended by SIGKILL; try again$"),
        LocalLauncher() as place,
        Workers(place, PROGRAM, ("one", "second one"), lambda: "try again") as workers,
    ):
        start(workers, "wait", "wait")
        workers.until("ready", 1)
        workers.processes[1].kill()
        workers.wait(LONG)
    assert "what a library prints" in (tmp_path / "second-one.log").read_text()


def test_a_lost_peer_alone_is_told_once_others_had_their_time(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "GRACE", 0.5)
    with (
        pytest.raises(LinkError, match=r"^rank 1 is lost$"),
        LocalLauncher() as place,
        Workers(place, PROGRAM) as workers,
    ):
        start(workers, "link rank 1 is lost", "wait")
        workers.wait(LONG)


def test_a_rank_that_hears_no_signal_is_killed_at_a_second_interrupt(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), LocalLauncher() as place, Workers(place, PROGRAM) as workers:
        start(workers, "deaf")
        workers.until("deaf", 0)
        monkeypatch.setattr("thinwire.runs.machine.interrupts.time.sleep", interrupt)
        raise KeyboardInterrupt
    assert workers.processes[0].returncode == -signal.SIGKILL


def test_a_rank_ends_with_its_starter(start: Any) -> None:
    with LocalLauncher() as place, Workers(place, PROGRAM) as workers:
        start(workers, "deaf")
        workers.until("deaf", 0)
        process: subprocess.Popen[str] = workers.processes[0]
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LONG) == 3
    gone([process.pid])
