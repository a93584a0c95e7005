"""The command thinwire emulate: what it runs, refuses, calls invalid and leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from commanded import invoke as thinwire
from emulated import BUSY, TURN, emulate, emulation
from emulated_lines import trip
from launchers import Command, children, until, warm

from thinwire.links.profile import Profile
from thinwire.runs.emulator import process_cleanup
from thinwire.runs.emulator.session import Emulation
from thinwire.runs.emulator.syscalls import INSTEAD
from thinwire.runs.ranks.commands import run_ranks
from thinwire.runs.ranks.supervise import LATE
from thinwire.types import InputError, MeasurementError


@pytest.mark.serial
def test_the_command_runs_once_a_rank_and_everything_is_recorded() -> None:
    program = "echo rank $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT"
    run = emulate("--link", "50mbit,4ms", "--json", "--", "sh", "-c", program)
    skip_if_refused(run)
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        assert f"[{rank}] rank {rank} of 2 at 10.77.0.1:29500" in run.stderr
    about = json.loads(run.stdout)
    assert about["profiles"] == ["50mbit,4ms"] * 2 and about["valid"] is True
    assert about["congestion"] == {"asked": "cubic", "found": "cubic"}
    assert about["check"]["links"][0]["trip_asked"] == pytest.approx(0.008, abs=1e-3)


def skip_if_refused(run: subprocess.CompletedProcess[str]) -> None:
    """Skip where the system does not allow emulation, or has no time for it just now."""
    if (run.returncode == 2 and INSTEAD in run.stderr) or "too busy to keep time" in run.stderr:
        pytest.skip(run.stderr.strip())


def test_a_rank_that_dies_stops_the_others() -> None:
    begin = time.monotonic()
    program = "if [ $RANK = 1 ]; then kill -9 $$; fi; exec sleep 300"
    run = emulate("--link", "100mbit,1ms", "--no-check", "--", "sh", "-c", program)
    skip_if_refused(run)
    assert run.returncode == 137
    assert run.stderr.splitlines()[-1] == "thinwire: rank 1 was ended by SIGKILL; the others were stopped"
    assert time.monotonic() - begin < 100 + TURN


WRONG = [
    (["--link", "100mbit", "--ranks", "1"], "choose 2 to 16"),
    (["--link", "100mbit", "--", "no-such-command"], "command 'no-such-command' is not found"),
    (["--link", "0mbit"], "'0mbit'"),
    (["--link", "trace:/nowhere.csv"], "no trace file '/nowhere.csv'"),
    ([], "no --link is given"),
    (["--link", "none", "--no-check"], "there is nothing to do"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[w for _, w in WRONG])
def test_bad_input_is_one_sentence(arguments: list[str], words: str) -> None:
    run = thinwire("emulate", *arguments)
    assert run.exit_code == 2 and run.stdout == ""
    (sentence,) = run.stderr.strip().splitlines()
    assert sentence.startswith("thinwire: ") and words in sentence


def test_an_unknown_congestion_control_is_one_sentence() -> None:
    refused = pytest.raises(InputError, match=r"no congestion control 'teleport'; choose one of .*reno")
    with refused, emulation("100mbit", congestion="teleport", refused="teleport"):
        pass


def root_only() -> None:
    if os.geteuid() or shutil.which("setpriv") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, setpriv and unshare to take permissions away")


def test_without_a_tun_device_one_sentence() -> None:
    root_only()
    hide = 'mount -t tmpfs none /dev/net 2>/dev/null || exit 77; exec "$@"'
    run = emulate("--link", "none", before=["unshare", "-m", "sh", "-c", hide, "sh"])
    if run.returncode == 77:
        pytest.skip("this system does not let root mount")
    assert run.returncode == 2
    (sentence,) = run.stderr.strip().splitlines()
    assert "cannot open /dev/net/tun" in sentence and "no TCP dynamics" in sentence


def test_without_permission_one_sentence() -> None:
    """As root without capabilities, where user namespaces are used up."""
    root_only()
    bar = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-sys_admin "$@"'
    run = emulate("--link", "none", before=["unshare", "-Ur", "sh", "-c", bar, "sh"])
    if "unshare failed" in run.stderr:
        pytest.skip("this system does not let root make a user namespace")
    assert run.returncode == 2
    (sentence,) = run.stderr.strip().splitlines()
    assert "lets neither this user nor a user namespace make networks" in sentence


@pytest.mark.serial
def test_it_works_in_a_user_namespace() -> None:
    root_only()
    fewer = ["setpriv", "--bounding-set=-sys_admin,-net_admin"]
    program = "readlink /proc/self/ns/user; ls /sys/class/net >/dev/null"
    run = emulate("--link", "20mbit,30ms", "--json", "--", "sh", "-c", program, before=fewer)
    skip_if_refused(run)
    assert run.returncode == 0, run.stderr
    about = json.loads(run.stdout)
    assert about["isolation"] == "user namespace" and about["congestion"]["found"] == "cubic"
    own = str(Path("/proc/self/ns/user").readlink())
    inside = [line.split()[1] for line in run.stderr.splitlines() if "user:[" in line]
    assert len(inside) == 2 and own not in inside


def test_two_at_once_are_refused() -> None:
    with (
        emulation("100mbit,1ms"),
        pytest.raises(InputError, match=rf"{BUSY} \(process \d+\)"),
        Emulation([Profile.parse("100mbit")] * 2),
    ):
        pass


# A machine that does not keep time, and processes that are killed.


def router_pid() -> int:
    (pid,) = [p for p in children(os.getpid()) if "emulator.isolation" in command_line(p)]
    return pid


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_a_late_run_is_no_result() -> None:
    """A router that is held up while packets are due has been late, whatever held it up."""
    with emulation("100mbit,20ms") as net:
        net.verdict()
        for _ in range(3):
            connecting = threading.Thread(target=trip, args=(net,))
            connecting.start()
            time.sleep(0.01)
            os.kill(router_pid(), signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(router_pid(), signal.SIGCONT)
            connecting.join(30)
    assert net.lateness().worst > 0.1
    assert net.describe()["valid"] is False
    with pytest.raises(MeasurementError, match=r"too busy to keep time: packets were \d+\.\d+ ms late"):
        net.verdict()


def test_without_its_relay_nothing_is_valid() -> None:
    with emulation("100mbit,1ms") as net:
        threading.Timer(1.0, os.kill, (router_pid(), signal.SIGKILL)).start()
        with pytest.raises(MeasurementError, match="router ended by SIGKILL"):
            run_ranks(net, ["sleep", "300"])
    with pytest.raises(MeasurementError, match="router ended by SIGKILL"):
        net.verdict()


def test_pipes_that_stay_open_are_waited_for_together() -> None:
    """What ranks left behind holds two pipes of each: one wait for all, not one for each."""
    with emulation("100mbit,1ms", ranks=4) as net:
        begin, shown = time.monotonic(), list[bytes]()
        left = ["sh", "-c", "setsid sleep 30 & echo done"]
        assert run_ranks(net, left, lambda rank, is_error, line: shown.append(line)) is None
        assert time.monotonic() - begin < 4 * LATE
    assert len(shown) == 4


def start_and_wait(place: Path) -> tuple[Command, str]:
    """Start ``thinwire emulate`` with a command that leaves others behind; return it and its mark."""
    program = "setsid sleep 1234 & exec sleep 1234"
    command = ["emulate", "--link", "100mbit,1ms", "--no-check"]
    end = time.monotonic() + TURN
    while True:
        p = warm().start(place, *command, "--", "sh", "-c", program)
        mark = process_cleanup.mark(p.pid)
        until(lambda: p.poll() is not None or len(marked(mark)) == 5, "the ranks to run")  # noqa: B023
        if p.poll() is None:
            return p, mark
        assert BUSY in p.err or INSTEAD in p.err, p.err
        if INSTEAD in p.err or time.monotonic() > end:
            pytest.skip(p.err.strip())
        time.sleep(0.5)


def marked(mark: str) -> list[int]:
    """Return the processes of an emulation: its router, and on each of two ranks a command and its child."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if f"{process_cleanup.MARK}={mark}".encode() in variables and (entry / "ns").exists():
            found.append(int(entry.name))
    return found


def test_a_killed_emulation_leaves_nothing(tmp_path: Path) -> None:
    p, mark = start_and_wait(tmp_path)
    assert len({Path(f"/proc/{pid}/ns/net").readlink() for pid in marked(mark)}) == 2
    p.signal(signal.SIGKILL)
    assert p.wait() == -signal.SIGKILL
    # Processes and their descriptors are all that holds namespaces and devices.
    until(lambda: not marked(mark), "all processes to be gone", 30)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all(tmp_path: Path, how: signal.Signals) -> None:
    p, mark = start_and_wait(tmp_path)
    p.signal(how)
    assert p.wait(60) == 130
    assert p.err.strip().splitlines()[-1] == "thinwire: interrupted"
    assert not marked(mark)


def test_clean_ends_orphans_and_nothing_else(tmp_path: Path) -> None:
    """Where router and owner were killed at once, processes in the background can stay."""
    p, mark = start_and_wait(tmp_path)
    router = next(pid for pid in marked(mark) if "emulator.isolation" in command_line(pid))
    os.kill(router, signal.SIGSTOP)  # so that it cannot sweep
    p.signal(signal.SIGKILL)
    p.wait()
    os.kill(router, signal.SIGKILL)
    until(lambda: len(marked(mark)) == 2, "the ranks' own end")
    variables = os.environ | {process_cleanup.MARK: process_cleanup.mark(os.getpid())}
    with subprocess.Popen(["sleep", "1234"], env=variables) as own:
        found = {o.pid for o in process_cleanup.orphans()}
        assert set(marked(mark)) <= found and own.pid not in found
        run = thinwire("emulate", "--clean")
        assert run.exit_code == 0 and run.stderr.count("sleep 1234") >= 2
        assert not marked(mark) and own.poll() is None
        own.kill()
    assert "nothing was left behind" in thinwire("emulate", "--clean").stderr
