"""What goes wrong around an emulation: devices, descriptors, answers that do not come, other containers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from emulated import emulation
from launchers import until

from thinwire.runs.emulator import process_cleanup, session
from thinwire.runs.emulator.namespaces import QUEUE
from thinwire.runs.emulator.session import RouterProcess
from thinwire.runs.emulator.shaping_control import CONTROL, lifted, rewind
from thinwire.runs.emulator.timing_error import PacketLateness, fault
from thinwire.runs.ranks.commands import run_ranks
from thinwire.types import MeasurementError

DELETE = """
import os
from pyroute2 import IPRoute
if os.environ["RANK"] == "0":
    with IPRoute() as ip:
        ip.link("del", index=ip.link_lookup(ifname="tun0")[0])
import time
time.sleep(300)
"""
FLOOD = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[1])):
    s.sendto(bytes(10), ("10.77.0.2", 9))
"""


@pytest.mark.parametrize(
    ("late", "waited", "dropped", "words"),
    [
        (PacketLateness(10, 0.0009, seconds=10, late_seconds=1), 0.0009, 0, None),
        (PacketLateness(10, 0.0, seconds=100, late_seconds=5), 0.0, 0, None),
        (PacketLateness(10, 0.0011), 0.0, 0, "1.10 ms late on average, above the limit of 1.00 ms"),
        (PacketLateness(10, 0.0, seconds=100, late_seconds=6), 0.0, 0, "late in 6 of 100 seconds"),
        (PacketLateness(10, 0.0), 0.002, 0, "waited 2.00 ms for a processor"),
        (PacketLateness(10, 0.0), 0.0, 1, "lost because the router did not read them in time (1 of them)"),
    ],
)
def test_each_way_not_to_keep_time_is_a_fault(
    late: PacketLateness, waited: float, dropped: int, words: str | None
) -> None:
    found = fault(late, waited, dropped, 0.001)
    assert found is None if words is None else found is not None and words in found


def test_a_command_that_deletes_its_device_ends_the_measurement() -> None:
    with emulation("100mbit,1ms") as net:
        with suppress(MeasurementError):  # or it says that the router, as it left, killed the ranks
            assert run_ranks(net, [sys.executable, "-c", DELETE]) is not None
        with pytest.raises(MeasurementError, match="device tun0 of rank 0 is gone"):
            net.state()
    with pytest.raises(MeasurementError, match="device tun0 of rank 0 is gone"):
        net.verdict()


def test_what_a_device_drops_while_the_relay_is_held_up_is_counted() -> None:
    with emulation("100mbit,1ms") as net:
        assert net.state()["device_dropped"] == [0, 0]
        assert net._router is not None
        router = net._router._process.pid
        os.kill(router, signal.SIGSTOP)
        flood = [sys.executable, "-c", FLOOD, str(2 * QUEUE)]
        try:
            assert net.popen(0, flood, os.environ | net.environment(0)).wait(120) == 0
        finally:
            os.kill(router, signal.SIGCONT)
        first, second = net.state()["device_dropped"]
        assert first >= QUEUE - 100 and second == 0
        with pytest.raises(MeasurementError, match="too busy to keep time"):
            net.verdict()
        net.restart()
        assert net.state()["device_dropped"][0] == 0


def test_a_late_answer_is_never_taken_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ANSWER", 0.1)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    router = RouterProcess.__new__(RouterProcess)
    router._asking, router._lost, router._control = threading.Lock(), None, near
    with near, far:
        with pytest.raises(MeasurementError, match="no answer"):
            router.ask("restart", clean=False)
        far.send(json.dumps({"start": 1.0}).encode())
        with pytest.raises(MeasurementError, match="no answer"):
            router.ask("state")


@pytest.mark.parametrize("kind", ["closed", "file", "other socket", "no number"])
def test_a_descriptor_that_is_not_the_launcher_s_is_left_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with a, b, (tmp_path / "x").open("wb") as file:
        closed = os.dup(file.fileno())
        os.close(closed)
        number = {"closed": closed, "file": file.fileno(), "other socket": a.fileno(), "no number": "x"}[kind]
        monkeypatch.setenv(CONTROL, str(number))
        with lifted():
            rewind()
        b.setblocking(False)
        with pytest.raises(BlockingIOError):  # nothing was written to it
            b.recv(1)


def test_processes_of_a_container_are_nobody_s_orphans() -> None:
    """Their mark names a process by the container's numbers."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    variables = os.environ | {process_cleanup.MARK: "999999999.1"}
    argv = ["unshare", "--pid", "--fork", "--kill-child", "--", "sleep", "4321"]
    with subprocess.Popen(argv, env=variables) as outer, subprocess.Popen(argv[-2:], env=variables) as here:
        try:
            until(lambda: outer.poll() is not None or len(sleepers()) == 2, "both to run", 30)
            if outer.poll() is not None:
                pytest.skip("this system does not let this user make a process namespace")
            found = {o.pid for o in process_cleanup.orphans()}
            assert here.pid in found
            assert not found & (sleepers() - {here.pid})
        finally:
            outer.kill()
            here.kill()


def sleepers() -> set[int]:
    """Return the processes that sleep for 4321 seconds."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes() == b"sleep\0" + b"4321\0":
                found.add(int(entry.name))
        except OSError:
            continue
    return found
