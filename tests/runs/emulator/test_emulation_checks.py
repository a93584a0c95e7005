"""Networks that fail their check, drop packets or cannot be asked for, and what records say then."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commanded import invoke as thinwire
from emulated import BUSY, TURN, emulation, lacking
from emulation_runs import EMULATE, SMALL
from launchers import children, record
from run_records import write_run

from tests.runs.emulator.test_late import LATE, RANK, StandIn
from thinwire.links.profile import Profile
from thinwire.links.shape import LinkShape
from thinwire.links.trace import Trace, TraceRow
from thinwire.runs.emulator import availability, namespaces, session
from thinwire.runs.emulator.namespaces import RankNamespace
from thinwire.runs.emulator.router import PacketRouter
from thinwire.runs.ranks import launcher
from thinwire.runs.records.writer import COMPARE
from thinwire.types import InputError, MeasurementError
from thinwire.uses.doctor.run import diagnosis
from thinwire.uses.training.run import training_launch
from thinwire.uses.training.run.options import TrainConfig


def test_the_network_of_a_run_that_failed_is_judged_too(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whoever goes on from its checkpoint would know of its own network alone."""
    write_run(tmp_path / "made", "fp32", status="running")
    monkeypatch.setenv("MADE", str(tmp_path / "made"))
    monkeypatch.setattr(StandIn, "late", LATE)
    monkeypatch.setattr(session, "Emulation", StandIn)
    words = json.dumps({"kind": "error", "error": "LinkError", "text": "a peer is gone"})
    failing = f"{RANK}\nprint({words!r})\nraise SystemExit(3)"
    monkeypatch.setattr(launcher, "_command", lambda *_: [sys.executable, "-c", failing])
    run = thinwire(*SMALL, "--data", text, "--out", tmp_path / "out", "--steps", 2, *EMULATE)
    assert run.exit_code == 3, run.stderr
    found = record(tmp_path / "out")
    assert found["status"] == "failed" and found["link"]["emulator"]["valid"] is False


# A self-check that fails.


class Wrong(StandIn):
    """A stand-in for a network that is not as asked for."""

    closed = 0

    def check(self) -> None:
        raise MeasurementError("the emulated network is not what was asked for")

    def close(self) -> None:
        self.closed += 1


def test_a_check_that_fails_closes_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "Emulation", Wrong)
    place: Any = launcher.EmulatedLauncher(TrainConfig(emulate=True, link="20mbit,5ms"))
    with pytest.raises(MeasurementError), place:
        pass
    assert place._net.closed == 1


def test_after_a_check_that_failed_another_emulation_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(net: session.Emulation) -> None:
        raise MeasurementError("the emulated network is not what was asked for")

    monkeypatch.setattr(session.Emulation, "check", fail)
    place = failed(time.monotonic() + TURN)  # held on to, as the traceback of an error may be
    assert not [pid for pid in children(os.getpid()) if b"emulator.isolation" in command_line(pid)]
    with emulation("100mbit,1ms"):
        pass
    assert place is not None


def failed(end: float) -> launcher.EmulatedLauncher:
    """Return a place whose network failed its check, or skip the test where there is no such network."""
    while True:
        place = launcher.EmulatedLauncher(TrainConfig(emulate=True, link="100mbit,1ms"))
        try:
            with place:
                raise AssertionError("the check did not fail")
        except MeasurementError:
            return place
        except InputError as e:
            if not lacking(str(e)):
                raise
            if BUSY not in str(e) or time.monotonic() > end:
                pytest.skip(str(e))
        time.sleep(0.5)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("before", [True, False], ids=["in a used folder", "in a new folder"])
def test_an_earlier_record_does_not_pass_for_that_of_a_failed_check(
    before: bool, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "Emulation", Wrong)
    if before:
        write_run(tmp_path / "out", "fp32")
    run = thinwire(*SMALL, "--data", text, "--out", tmp_path / "out", "--steps", 2, *EMULATE)
    assert run.exit_code == 4 and "is not what was asked for" in run.stderr
    assert ("run.json is that of an earlier run" in run.stderr) is before
    assert (tmp_path / "out").exists() is before  # and what is there stays, as where an option is wrong


@pytest.mark.parametrize("finished", [0, 1])
def test_a_comparison_that_ends_early_says_how_to_see_what_finished(
    finished: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: TrainConfig) -> Path:
        if (Path(config.out).name == "fp32") is bool(finished):
            write_run(Path(config.out), config.recipe)
            return Path(config.out)
        raise MeasurementError("this machine was too busy")

    monkeypatch.setattr(training_launch, "launch", run)
    found = thinwire("compare", "fp32", "bf16", "--out", tmp_path, "--quiet")
    assert found.exit_code == 4
    assert f"after {finished} of 2 runs: this machine was too busy" in found.stderr
    shown = f"; thinwire report {tmp_path / COMPARE} shows those that finished"
    assert (shown in found.stderr) is bool(finished)


# Packets that a device drops.


@pytest.fixture
def pipes() -> Iterator[list[int]]:
    """Descriptors that a router can wait for."""
    fds = [*os.pipe(), *os.pipe()]
    yield fds
    for fd in fds:
        os.close(fd)


def test_drops_count_from_the_start_and_while_the_shape_is_on(
    pipes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = [5, 0]
    monkeypatch.setattr(namespaces, "dropped", dropped.__getitem__)
    ranks = [RankNamespace(net, pipes[2 * net], {}) for net in range(2)]
    router = PacketRouter(ranks, [Profile()] * 2, seed=0, limit=1e-3)
    try:
        assert router.state()["device_dropped"] == [0, 0]
        dropped[0] = 7
        router._lift(1)
        dropped[:] = [100, 100]
        router._lift(1)
        dropped[:] = [200, 200]
        router._lift(-1)
        assert router.state()["device_dropped"] == [2, 0]
        dropped[:] = [300, 300]
        router._lift(-1)
        dropped[1] = 301
        assert router.state()["device_dropped"] == [2, 1]
        router.restart()
        assert router.state()["device_dropped"] == [0, 0]
    finally:
        router._poll.close()
        os.close(router._timer.fileno())


def test_a_run_whose_devices_dropped_packets_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(net: StandIn) -> dict[str, Any]:
        return before(net) | {"lateness": {}, "device_dropped": [3, 4]}

    before = StandIn.state
    monkeypatch.setattr(StandIn, "state", state)
    monkeypatch.setattr(session, "Emulation", StandIn)
    run = thinwire("emulate", "--link", "20mbit,5ms", "--no-check", "--json", "--", "true")
    assert run.exit_code == 4
    assert json.loads(run.stdout)["valid"] is False
    assert "packets were lost because the router did not read them in time (7 of them)" in run.stderr


# Links that no link is like.


@pytest.mark.parametrize("part", ["50s", "delay=10001ms", "jitter=11s", "9" * 400 + "s"])
def test_a_delay_above_ten_seconds_is_refused(part: str) -> None:
    for parse in (Profile.parse, LinkShape.parse):
        with pytest.raises(InputError, match=r"is above 10 s; write it like 10") as e:
            parse(f"10mbit,{part}")
        assert part in str(e.value) and "\n" not in str(e.value)
        assert parse("10mbit,10s,jitter=10s").delay == 10.0


def test_a_trace_s_delay_above_ten_seconds_is_refused() -> None:
    with pytest.raises(InputError, match="the delay is 50000 ms; give 0 to 10000"):
        Trace((TraceRow(0, 1e6, 1e6, 50.0),), period=1.0)
    assert Trace((TraceRow(0, 1e6, 1e6, 10.0),), period=1.0).mean_delay == 10.0


# The doctor.

REFUSING = """
from thinwire.runs.emulator import isolation, syscalls
isolation.require_tun = isolation.isolate = lambda: True
def unshare(flags):
    raise PermissionError(1, "Operation not permitted")
syscalls.unshare = unshare
"""


def test_the_doctor_sees_that_a_user_namespace_is_given_but_of_no_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pyroute2")
    monkeypatch.setattr(availability, "TRIAL", REFUSING + availability.TRIAL)
    found = diagnosis.emulation()
    assert found.status == diagnosis.LACKS
    assert "does not allow a network in a namespace (Operation not permitted)" in found.finding
    assert "run as root" in found.remedy
