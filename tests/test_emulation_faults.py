"""What must not pass for a measurement, and how an emulation lets go of its network, commands and terminal.

Most of it needs no emulated network: a stand-in reports what the test wants.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emulated import BUSY, TURN, emulation, lacking
from launchers import Command, children, metrics, record, sentence, warm
from run_records import write_run
from test_emulator_late import LATE, RANK, StandIn, thinwire
from texts import write_text
from thinwire.cli.emulate import _show
from thinwire.lab import diagnosis, launch, places, resume
from thinwire.lab.config import TrainConfig
from thinwire.lab.emulator import commands, namespaces, session
from thinwire.lab.emulator.commands import run_ranks
from thinwire.lab.emulator.namespaces import RankNamespace
from thinwire.lab.emulator.profile import Profile
from thinwire.lab.emulator.relay import Relay
from thinwire.lab.emulator.trace import Row, Trace
from thinwire.lab.record import COMPARE, EMULATED, KERNEL, RUN, LinkInfo, load_run, write_json
from thinwire.links.shape import LinkShape
from thinwire.types import InputError, MeasurementError

SMALL: list[Any] = [
    *("train", "--model", "gpt2-lab", "--batch", 4, "--microbatches", 2, "--seq", 32, "--recipe", "fp32"),
    *("--threads", 1, "--dtype", "fp32", "--no-tensorboard", "--no-save-model", "--quiet"),
    *("--eval-samples", 0),
]
EMULATE = ("--emulate", "--link", "20mbit,5ms")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


# What a resumed run inherits.

GOOD = LinkInfo("10mbit", emulation=KERNEL, lateness_s=1e-4, emulator={"valid": True})
LATER = LinkInfo("10mbit", emulation=KERNEL, emulator={"valid": False})
CARRIED = f"{resume.SPOILT}for a reason"


def earlier(
    out: Path, link: LinkInfo, /, status: str = "done", notes: Sequence[str] = (), **config: Any
) -> None:
    """Leave the record of an earlier run."""
    made = write_run(out, "fp32", steps=4, status=status)
    made.link, made.notes = link, list(notes)
    made.config |= {"link": "10mbit", "emulate": True, "congestion": "auto"} | config
    write_json(out / RUN, made.to_dict())


@pytest.mark.parametrize(
    ("link", "more", "words"),
    [
        (LATER, {"status": "invalid", "notes": ["one", "it was late"]}, "is of an invalid run (it was late)"),
        (LATER, {"status": "invalid"}, "is of an invalid run"),
        (LATER, {"status": "failed", "notes": ["rank 1 is gone"]}, "did not keep its time up to step 4"),
        (GOOD, {"link": "20mbit"}, "--link was '20mbit' up to step 4 and is '10mbit' since then"),
        (GOOD, {"emulate": False}, "--emulate was False"),
        (GOOD, {"congestion": "bbr"}, "--congestion was 'bbr'"),
        (GOOD, {"status": "running", "notes": ["resumed after step 2", CARRIED]}, CARRIED),
    ],
)
def test_what_spoils_the_times_before_a_resume_is_found(
    link: LinkInfo, more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    earlier(tmp_path, link, **more)
    (note,) = resume.doubts(TrainConfig(out=str(tmp_path), link="10mbit", emulate=True), 4)
    assert note.startswith(resume.SPOILT) and words in note
    found = load_run(tmp_path)
    found.notes = [note]
    assert resume.inherited(found) == note


@pytest.mark.parametrize("emulation", [KERNEL, EMULATED])
def test_times_that_nobody_judged_get_a_note_alone(emulation: str, tmp_path: Path) -> None:
    earlier(tmp_path, LinkInfo("10mbit", emulation=emulation), "interrupted")
    (note,) = resume.doubts(TrainConfig(out=str(tmp_path), link="10mbit", emulate=True), 4)
    assert "how late the link was up to step 4 is not known" in note and resume.SPOILT not in note


def test_nothing_speaks_against_a_valid_run_or_one_without_a_link(tmp_path: Path) -> None:
    config = TrainConfig(out=str(tmp_path), link="10mbit", emulate=True)
    assert resume.doubts(config, 4) == []  # there is no record
    for link, status in ((GOOD, "done"), (GOOD, "interrupted"), (LinkInfo(), "interrupted")):
        earlier(tmp_path, link, status)
        assert resume.doubts(config, 4) == []


def trained(place: Path, starter: str, *arguments: Any) -> Command:
    """Run a job to its end as the launcher starts it, or as torchrun does; return what speaks for it."""
    if starter == "launcher":
        return warm().run(place, *arguments)
    ranks = warm().ranks(place, *arguments)
    assert ranks[1].wait() == 0, ranks[1].err
    ranks[0].wait()
    return ranks[0]


def test_a_run_that_goes_on_from_an_invalid_one_is_invalid(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = [*SMALL, "--data", text, "--out", out, "--checkpoint-every", 2]
    first = trained(tmp_path / "first", "torchrun", *job, "--steps", 2)
    assert first.code == 0, first.err
    made = load_run(out)
    made.status, made.notes = "invalid", [*made.notes, "packets were late"]
    write_json(out / RUN, made.to_dict())
    for steps, starter in ((2, "torchrun"), (4, "launcher")):  # nothing is left to train, then two steps more
        command = trained(tmp_path / starter, starter, *job, "--steps", steps, "--resume")
        assert command.code == 4, command.err
        assert "no measurement: " in sentence(command) and "(packets were late)" in sentence(command)
        assert len(metrics(out)) == steps
        assert record(out)["status"] == "invalid"
        assert any("(packets were late)" in note for note in record(out)["notes"])


def test_a_run_that_goes_on_over_another_link_is_invalid(text: Path, tmp_path: Path) -> None:
    """The first part's link is written into its record: over a real one, a busy machine would be late too."""
    out = tmp_path / "out"
    job = [*SMALL, "--data", text, "--out", out, "--checkpoint-every", 2, "--steps", 2]
    for options in ((), ("--resume",)):
        command = trained(tmp_path / "same", "torchrun", *job, *options)
        assert command.code == 0, command.err
    made = load_run(out)
    made.config["link"] = "1gbit"
    write_json(out / RUN, made.to_dict())
    command = trained(tmp_path / "other", "torchrun", *job, "--resume")
    assert command.code == 4, command.err
    assert "--link was '1gbit' up to step 2 and is 'none' since then" in sentence(command)
    assert record(out)["status"] == "invalid"


def test_the_network_of_a_run_that_failed_is_judged_too(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whoever goes on from its checkpoint would know of its own network alone."""
    write_run(tmp_path / "made", "fp32", status="running")
    monkeypatch.setenv("MADE", str(tmp_path / "made"))
    monkeypatch.setattr(StandIn, "late", LATE)
    monkeypatch.setattr(session, "Emulation", StandIn)
    words = json.dumps({"error": "LinkError", "text": "a peer is gone"})
    failing = f"{RANK}\nprint({words!r})\nraise SystemExit(3)"
    ours = places._command
    monkeypatch.setattr(places, "_command", lambda e: ([sys.executable, "-c", failing], ours(e)[1]))
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
    place: Any = places.Emulated(TrainConfig(emulate=True, link="20mbit,5ms"))
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


def failed(end: float) -> places.Emulated:
    """Return a place whose network failed its check, or skip the test where there is no such network."""
    while True:
        place = places.Emulated(TrainConfig(emulate=True, link="100mbit,1ms"))
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

    monkeypatch.setattr(launch, "launch", run)
    found = thinwire("compare", "fp32", "bf16", "--out", tmp_path, "--quiet")
    assert found.exit_code == 4
    assert f"after {finished} of 2 runs: this machine was too busy" in found.stderr
    shown = f"; thinwire report {tmp_path / COMPARE} shows those that finished"
    assert (shown in found.stderr) is bool(finished)


# Packets that a device drops.


@pytest.fixture
def pipes() -> Iterator[list[int]]:
    """Descriptors that a relay can wait for."""
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
    relay = Relay(ranks, [Profile()] * 2, seed=0, limit=1e-3)
    try:
        assert relay.state()["device_dropped"] == [0, 0]
        dropped[0] = 7
        relay._lift(1)
        dropped[:] = [100, 100]
        relay._lift(1)
        dropped[:] = [200, 200]
        relay._lift(-1)
        assert relay.state()["device_dropped"] == [2, 0]
        dropped[:] = [300, 300]
        relay._lift(-1)
        dropped[1] = 301
        assert relay.state()["device_dropped"] == [2, 1]
        relay.restart()
        assert relay.state()["device_dropped"] == [0, 0]
    finally:
        relay._poll.close()
        os.close(relay._timer.fileno())


def test_a_run_whose_devices_dropped_packets_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(net: StandIn) -> dict[str, Any]:
        return before(net) | {"lateness": {}, "device_dropped": [3, 4]}

    before = StandIn.state
    monkeypatch.setattr(StandIn, "state", state)
    monkeypatch.setattr(session, "Emulation", StandIn)
    run = thinwire("emulate", "--link", "20mbit,5ms", "--no-check", "--json", "--", "true")
    assert run.exit_code == 4
    assert json.loads(run.stdout)["valid"] is False
    assert "packets were lost because the relay did not read them in time (7 of them)" in run.stderr


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
        Trace((Row(0, 1e6, 1e6, 50.0),), period=1.0)
    assert Trace((Row(0, 1e6, 1e6, 10.0),), period=1.0).mean_delay == 10.0


# Commands: an interrupt, and what they print.

SAVER = """
import os, pathlib, time
place, rank = pathlib.Path(os.environ["PLACE"]), os.environ["RANK"]
try:
    (place / f"ready-{rank}").touch()
    time.sleep(300)
except KeyboardInterrupt:
    (place / f"told-{rank}").touch()
    time.sleep(float(os.environ["SECONDS"]))
    (place / f"saved-{rank}").touch()
"""


class Here:
    """Two ranks where the test runs, and a Ctrl-C as soon as both are ready for it."""

    profiles = (None, None)

    def __init__(self, place: Path, seconds: int = 0) -> None:
        self._place, self._seconds = place, seconds
        self.started: list[subprocess.Popen[bytes]] = []

    def environment(self, rank: int) -> dict[str, str]:
        return {"RANK": str(rank), "PLACE": str(self._place), "SECONDS": str(self._seconds)}

    def popen(self, rank: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        self.started.append(subprocess.Popen(argv, **options))
        return self.started[-1]

    def both(self, what: str) -> bool:
        return all((self._place / f"{what}-{rank}").exists() for rank in range(2))

    def require_alive(self) -> None:
        if self.both("ready"):
            raise KeyboardInterrupt


def test_commands_may_save_what_they_have_at_an_interrupt(tmp_path: Path) -> None:
    net: Any = Here(tmp_path, seconds=1)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(net, [sys.executable, "-c", SAVER])
    assert net.both("saved")
    assert [p.returncode for p in net.started] == [0, 0]


def test_a_second_interrupt_ends_commands_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net: Any = Here(tmp_path, seconds=300)

    def sleep(seconds: float) -> None:
        if net.both("told"):
            raise KeyboardInterrupt
        time.sleep(seconds)

    monkeypatch.setattr(commands, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    monkeypatch.setattr(commands, "GRACE", 120.0)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(net, [sys.executable, "-c", SAVER])
    assert [p.returncode for p in net.started] == [-signal.SIGKILL] * 2
    assert not net.both("saved")


PRINTER = """
import os, pathlib, sys, time
for stream in (sys.stdout.buffer, sys.stderr.buffer):
    stream.write(b"0%\\r50%\\r100%\\na\\r\\nb\\r5")
    stream.flush()
seen = pathlib.Path(os.environ["PLACE"]) / "seen"
end = time.monotonic() + 60
while not seen.exists():
    time.sleep(0.02)
    if time.monotonic() > end:
        sys.exit(9)
"""


def test_a_line_that_is_to_be_written_over_is_seen_before_it_ends(tmp_path: Path) -> None:
    lines: dict[tuple[int, bool], list[bytes]] = {(rank, e): [] for rank in range(2) for e in (False, True)}

    def show(rank: int, is_error: bool, line: bytes) -> None:
        lines[rank, is_error].append(line)
        if all(b"b\r" in lines[rank, False] for rank in range(2)):
            (tmp_path / "seen").touch()

    net: Any = Here(tmp_path)
    assert run_ranks(net, [sys.executable, "-c", PRINTER], show, (True, False)) is None
    for rank in range(2):
        assert lines[rank, False] == [b"0%\r", b"50%\r", b"100%\n", b"a\r\n", b"b\r", b"5"]
        assert lines[rank, True] == [b"0%\r50%\r100%\n", b"a\r\n", b"b\r5"]


def test_on_a_terminal_a_line_takes_the_place_of_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "12")
    terminal, file = Terminal(), io.StringIO()
    show = _show((file, terminal))
    show(0, True, b"50% of a long bar\r")
    show(1, True, b"a line longer than that\n")
    show(1, False, b"50%\r100%\n")
    assert terminal.getvalue() == "\r\x1b[K[0] 50% of \r\x1b[K[1] a line longer than that\n"
    assert file.getvalue() == "[1] 50%\r100%\n"


# The doctor.

REFUSING = """
from thinwire.lab.emulator import isolation, syscalls
isolation.require_tun = isolation.isolate = lambda: True
def unshare(flags):
    raise PermissionError(1, "Operation not permitted")
syscalls.unshare = unshare
"""


def test_the_doctor_sees_that_a_user_namespace_is_given_but_of_no_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pyroute2")
    monkeypatch.setattr(diagnosis, "TRIAL", REFUSING + diagnosis.TRIAL)
    found = diagnosis._emulation()
    assert found.status == diagnosis.LACKS
    assert "does not allow a network in a namespace (Operation not permitted)" in found.finding
    assert "run as root" in found.remedy
