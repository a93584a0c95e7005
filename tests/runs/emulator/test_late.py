"""Where the router was late: exit code 4, and a record that says so, whichever command it was.

The network stands in for a real one: its ranks run where the test does, and it reports what lateness the test
wants. So nothing here depends on how busy the machine is, or on what it allows. And the death of a rank
inside a real network, which needs one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from commanded import invoke as thinwire
from emulated import BUSY, TURN, lacking
from launchers import Command, children, gone, reached, record, sentence, until, warm
from run_records import write_run
from texts import write_text

from thinwire.runs.emulator import session
from thinwire.runs.emulator.path import Count, LineCounts, RankCounts
from thinwire.runs.emulator.timing_error import PacketLateness
from thinwire.runs.ranks import launcher

LATE, IN_TIME = (
    PacketLateness(100, 0.05, 0.06, 0.07, 0.05, 3, 3),
    PacketLateness(100, 1e-4, 1e-3, 2e-3, 2e-4, 3, 0),
)
RANK = """
import json, os, shutil
if os.environ["RANK"] == "0":
    out = json.loads(os.environ["THINWIRE_CONFIG"])["out"]
    os.makedirs(out, exist_ok=True)
    shutil.copy(os.environ["MADE"] + "/run.json", out)
"""


class StandIn(session.Emulation):
    """An emulation that needs nothing of the system, with a router as late as the test says."""

    late: ClassVar[PacketLateness] = LATE

    def __enter__(self) -> Self:
        self._setup = {"user_namespace": False, "settings": [{}], "scheduling": "none"}
        return self

    def check(self) -> None:  # type: ignore[override]
        pass

    def require_alive(self) -> None:
        pass

    def popen(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        self._commands.append(subprocess.Popen(argv, env=env, **options))
        return self._commands[-1]

    def state(self) -> dict[str, Any]:
        none = LineCounts(Count(), Count(), Count())
        counters = [dataclasses.asdict(RankCounts(none, none)) for _ in self.profiles]
        late = dataclasses.asdict(self.late)
        kept = {"run_queue_wait": 0.0, "device_dropped": [0] * len(counters), "cpu_share": 0.1}
        return {"counters": counters, "lateness": late} | kept


@pytest.fixture(params=[True, False], ids=["late", "in time"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Put the stand-in where an emulation would be, late or not."""
    monkeypatch.setattr(StandIn, "late", LATE if request.param else IN_TIME)
    monkeypatch.setattr(session, "Emulation", StandIn)
    return bool(request.param)


def test_the_command_says_so(late: bool) -> None:
    run = thinwire("emulate", "--link", "20mbit,5ms", "--no-check", "--json", "--", "true")
    assert run.exit_code == (4 if late else 0), run.stderr
    assert json.loads(run.stdout)["valid"] is not late
    assert ("too busy to keep time: packets were 50.00 ms late on average" in run.stderr) is late


def test_a_failed_rank_is_told_besides(late: bool) -> None:
    run = thinwire("emulate", "--link", "20mbit,5ms", "--no-check", "--", "false")
    assert run.exit_code == (4 if late else 1)
    assert "failed with exit code 1; the others were stopped" in run.stderr


def test_a_run_s_record_is_invalid(late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks, which only bring a finished record, stand in too: the launcher has the last word."""
    write_run(tmp_path / "made", "thinwire")
    monkeypatch.setenv("MADE", str(tmp_path / "made"))
    monkeypatch.setattr(launcher, "_command", lambda *_: [sys.executable, "-c", RANK])
    text = write_text(tmp_path / "text.txt")
    small = ("--model", "gpt2-lab", "--batch", 4, "--microbatches", 2, "--seq", 32, "--steps", 2, "--quiet")
    place = ("--data", text, "--out", tmp_path / "out", "--emulate", "--link", "20mbit,5ms")
    run = thinwire("train", *small, *place)
    found = record(tmp_path / "out")
    assert found["link"]["lateness_s"] == (LATE if late else IN_TIME).mean
    assert found["link"]["emulator"]["valid"] is not late
    assert run.exit_code == (4 if late else 0), run.stderr
    assert found["status"] == ("invalid" if late else "done")
    assert any("too busy to keep time" in note for note in found["notes"]) is late


# A rank that is killed in a real network.


def start(place: Path, *options: Any) -> tuple[Command, list[int]]:
    """Start a run in an emulated network; return it and its ranks, or skip where there is no such network."""
    end = time.monotonic() + TURN
    while True:
        command = warm().start(place, *options)
        ranks: list[int] = until(
            lambda: command.poll() is not None or (len(p := workers(command.pid)) == 2 and p),  # noqa: B023
            "both ranks",
        )
        if command.poll() is None:
            return command, ranks
        if command.code == 4 or (command.code == 2 and lacking(command.err) and BUSY not in command.err):
            pytest.skip(sentence(command))
        assert BUSY in command.err, command.err
        if time.monotonic() > end:
            pytest.skip(sentence(command))
        time.sleep(0.5)


def workers(launcher: int) -> list[int]:
    """Return the ranks that a launcher has started, by rank."""
    found = {}
    for pid in children(launcher):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if not any(v.startswith(b"RANK=") for v in variables):
                continue  # not begun
        except OSError:  # gone meanwhile
            continue
        name = b"-m\0thinwire.runs.ranks.rank_main\0thinwire.uses.training.run.training_rank:run_rank\0"
        if name in command:
            found[next(v for v in variables if v.startswith(b"RANK="))] = pid
    return [found[name] for name in sorted(found)]


def test_a_rank_killed_in_its_namespace_ends_the_run(tmp_path: Path) -> None:
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "out"
    small = ("train", "--model", "gpt2-lab", "--batch", 4, "--microbatches", 2, "--seq", 32, "--threads", 1)
    rest = ("--dtype", "fp32", "--no-tensorboard", "--no-save-model", "--quiet", "--eval-samples", 0)
    place = ("--data", text, "--out", out, "--emulate", "--link", "100mbit,2ms", "--steps", 3000)
    command, ranks = start(tmp_path, *small, *rest, *place)
    try:
        reached(out, 2, command)
        os.kill(ranks[1], signal.SIGKILL)
        begin = time.monotonic()
        assert command.wait() == 3
        assert time.monotonic() - begin < 40
        assert "rank 1 was ended by SIGKILL" in sentence(command)
        gone(ranks, 5)
        assert record(out)["status"] == "failed"
    finally:
        if command.poll() is None:
            command.signal(signal.SIGKILL)
            command.wait()
        gone(ranks)
