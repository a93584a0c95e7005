"""The emulator on the real kernel: iperf3 and ping inside it, faults, and what is left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from emulated import BUSY, TURN, emulate, emulation
from launchers import Command, children, cold, until
from thinwire.cli.app import app
from thinwire.lab.emulator import orphans
from thinwire.lab.emulator.check import DELAY_LIMIT, RATE_LIMIT, check_network
from thinwire.lab.emulator.commands import LATE, RankFailure, run_ranks
from thinwire.lab.emulator.isolation import INSTEAD
from thinwire.lab.emulator.lateness import LatenessMeter, limit
from thinwire.lab.emulator.packets import HEADER, destination, on_the_wire
from thinwire.lab.emulator.session import Emulation
from thinwire.links.shape import MTU, SEGMENT
from thinwire.types import InputError, MeasurementError

SENDER = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(int(sys.argv[2])):
    s.sendto(bytes(972), (sys.argv[1], 9999))
    time.sleep(0.0005)
"""
RECEIVER = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
s.bind(("", 9999))
s.settimeout(60)
n = 0
print("ready", flush=True)
try:
    while True:
        s.recv(2000)
        n += 1
        s.settimeout(2)
except TimeoutError:
    print(n, flush=True)
"""


def tun_packet(payload: int, segment: int = 0, to: bytes = bytes((10, 77, 0, 2))) -> bytes:
    """Build what a device hands over: virtio header, IPv4, TCP with time stamps, payload."""
    offload = bytes((1, 1 if segment else 0, 0, 0)) + segment.to_bytes(2, "little") + bytes(4)
    ip = bytes((0x45,)) + bytes(11) + bytes((10, 77, 0, 1)) + to
    tcp = bytes(12) + bytes((0x80,)) + bytes(19)
    return offload + ip + tcp + bytes(payload)


def test_an_offloaded_packet_counts_as_the_segments_that_a_card_would_send() -> None:
    assert len(tun_packet(0)) == HEADER + 52
    assert on_the_wire(tun_packet(100)) == (152, 1)
    assert on_the_wire(tun_packet(1448, SEGMENT)) == (1500, 1)
    assert on_the_wire(tun_packet(1449, SEGMENT)) == (1449 + 2 * 52, 2)
    assert on_the_wire(tun_packet(44 * 1448, SEGMENT)) == (44 * 1500, 44)


def test_only_packets_between_ranks_are_passed_on() -> None:
    assert destination(tun_packet(1)) == 1
    assert destination(tun_packet(1, to=bytes((10, 77, 1, 2)))) == -1
    assert destination(bytes(HEADER) + bytes((0x60,)) + bytes(60)) == -1  # IPv6
    assert destination(b"\x45" * 12) == -1


def test_lateness_adds_up() -> None:
    meter = LatenessMeter(limit=1e-3)
    for i in range(1000):
        meter.add(5.0, 0.02 if i >= 980 else 1e-4)
    meter.add(6.0, 0.0)
    found = meter.summary()
    assert (found.packets, found.seconds, found.late_seconds) == (1001, 2, 0)
    assert found.mean == pytest.approx((980 * 1e-4 + 20 * 0.02) / 1001)
    assert 0.018 < found.p99 <= found.worst == 0.02
    assert LatenessMeter(1e-3).summary().mean == 0.0
    assert limit(0.002) == 1e-3 and limit(0.1) == pytest.approx(5e-3)


def test_late_seconds_are_counted() -> None:
    meter = LatenessMeter(limit=1e-3)
    for second in range(4):
        meter.add(float(second), 0.5 if second == 2 else 0.0)
    found = meter.summary()
    assert (found.seconds, found.late_seconds, found.worst_second) == (4, 1, 0.5)


def test_a_late_second_counts_once_however_often_it_is_asked_for() -> None:
    meter = LatenessMeter(limit=1e-3)
    for i in range(20):
        meter.add(100.0 + i, 0.0)
    for now, late in ((120.1, 0.03), (120.5, 0.03), (120.9, 0.0)):
        meter.add(now, late)
        found = meter.summary()
        assert (found.seconds, found.late_seconds) == (21, 1)
    assert found.worst_second == pytest.approx(0.02)
    meter.add(121.0, 0.0)
    assert (meter.summary().seconds, meter.summary().late_seconds) == (22, 1)


def test_a_failure_is_one_sentence_with_a_shell_s_exit_code() -> None:
    assert str(RankFailure(1, -9)) == "rank 1 was ended by SIGKILL; the others were stopped"
    assert RankFailure(1, -9).exit_code == 137 and RankFailure(0, 3).exit_code == 3


# What iperf3 and ping find; the whole grid is bench/emulator.py's.


@pytest.mark.parametrize(
    ("mbit", "delay_ms", "congestion"), [(10, 50, "cubic"), (100, 5, "bbr"), (500, 5, "cubic")]
)
def test_iperf_and_ping_find_what_was_asked_for(mbit: int, delay_ms: int, congestion: str) -> None:
    bench = pytest.importorskip("bench.emulator")
    for program in ("iperf3", "ping"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    for _ in range(3):
        with emulation(f"{mbit}mbit,{delay_ms}ms", congestion=congestion) as net:
            trip = bench.round_trip(net)
            found = bench.goodput(net, seconds=4)
        if net.describe()["valid"]:
            break
    else:
        pytest.skip(f"the machine is too busy: {net.lateness()}")
    asked = mbit * 125e3 * SEGMENT / MTU
    assert found["congestion"] == congestion
    assert found["rate"] == pytest.approx(asked, rel=RATE_LIMIT)
    assert trip == pytest.approx(2e-3 * delay_ms, abs=DELAY_LIMIT)
    up = net.counters()[0].up
    assert up.passed.nbytes + up.dropped.nbytes > found["rate"] * 3  # headers and the warm-up on top


def test_the_check_sees_a_wrong_rate_and_a_wrong_delay() -> None:
    with emulation("20mbit,5ms") as net:
        good = net.check()
        assert good.congestion == "cubic" and len(good.links) == 1
        for wrong, words in (
            (replaced(net, 1.06, 0.0), "TCP carries"),
            (replaced(net, 1.0, 3e-3), "round trip"),
        ):
            with pytest.raises(MeasurementError, match=words):
                check_network(wrong, net.socket, net.restart).verdict("cubic")
        with pytest.raises(MeasurementError, match="congestion control cubic, but bbr"):
            good.verdict("bbr")


def replaced(net: Emulation, rate: float, delay: float) -> list:
    """Return the network's profiles with another rate and delay."""
    return [
        dataclasses.replace(p, up=p.up * rate, down=p.down * rate, delay=p.delay + delay)
        for p in net.profiles
    ]


def test_unlimited_and_unequal_networks_are_checked_too() -> None:
    with emulation("none", "2=30mbit,10ms", ranks=3) as net:
        links = {(c.source, c.destination): c for c in net.check().links}
    assert set(links) == {(0, 1), (1, 2), (2, 0)}
    assert links[0, 1].rate_asked is None and links[0, 1].trip_asked == 0.0
    assert links[1, 2].trip_asked == pytest.approx(0.010, abs=1e-3)  # the mean of 0 and 10 ms, there and back
    assert links[2, 0].rate_found == pytest.approx(30 * 125e3 * SEGMENT / MTU, rel=RATE_LIMIT)


def test_lost_packets_are_lost_and_counted() -> None:
    sent = 2000
    with emulation("100mbit,loss=5%", seed=3) as net:
        pipe = {"stdout": subprocess.PIPE, "text": True}
        receiver = net.popen(1, [sys.executable, "-c", RECEIVER], **pipe)
        assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
        net.restart()
        assert net.popen(0, [sys.executable, "-c", SENDER, net.address(1), str(sent)]).wait(60) == 0
        arrived = int(receiver.communicate(timeout=90)[0])
        up, down = net.counters()[0].up, net.counters()[1].down
    assert up.passed.packets == sent and up.dropped.packets == 0
    assert up.passed.nbytes == sent * 1000
    assert down.passed.packets == arrived == sent - up.lost.packets
    assert 0.03 * sent < up.lost.packets < 0.07 * sent


# The session.


def test_a_rank_sees_its_network_and_its_place_in_it() -> None:
    code = (
        "import os, socket; names = [n for _, n in socket.if_nameindex()]; "
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], *sorted(names))"
    )
    with emulation("100mbit,1ms", ranks=3) as net:
        ranks = [
            net.popen(
                r, [sys.executable, "-c", code], env=os.environ | net.environment(r), stdout=subprocess.PIPE
            )
            for r in range(3)
        ]
        said = [p.communicate(timeout=60)[0].split() for p in ranks]
        about = net.describe()
    names = [n for _, n in socket.if_nameindex()]
    for rank, words in enumerate(said):
        assert words[:2] == [str(rank).encode(), b"3"]
        assert {b"lo", b"tun0"} <= set(words[2:]) and len(words) < 2 + len(names) + 2
    assert net.environment(2)["MASTER_ADDR"] == net.address(0) == "10.77.0.1"
    assert about["settings"]["net.ipv4.tcp_slow_start_after_idle"] in ("0", "1")
    assert json.loads(json.dumps(about, allow_nan=False)) == about
    assert net.describe()["counters"] == about["counters"]  # readable after the end


def test_a_trace_begins_anew_at_every_restart(tmp_path: Path) -> None:
    """A trace of 20 ms for 3 s, then of 100 ms; restarts always find its first row."""
    file = tmp_path / "step.csv"
    file.write_text("seconds,up_mbit,down_mbit,delay_ms\n0,100,100,10\n3,100,100,50\n6,100,100,50\n")
    with emulation(f"trace:{file}") as net:
        for _ in range(2):
            net.restart()
            assert trip(net) == pytest.approx(0.02, abs=0.015)
        until(lambda: net.state()["seconds"] > 3.2, "the trace's second row")
        assert trip(net) == pytest.approx(0.1, abs=0.025)
        before = net.state()
        net.rewind()
        trip(net)  # behind the end of the connection before, which is under way and not overtaken
        assert trip(net) == pytest.approx(0.02, abs=0.015)
        after = net.describe()
        assert before["trace_began"] == 0 and after["trace_began"] > 3.2
        passed = [s["counters"][0]["up"]["passed"]["packets"] for s in (before, after)]
        assert 0 < passed[0] < passed[1]  # counters go on


def trip(net: Emulation) -> float:
    """Return how long connecting takes: one round trip."""
    with net.socket(1) as server, net.socket(0) as client:
        server.bind((net.address(1), 0))
        server.listen(1)
        client.settimeout(30)
        begin = time.monotonic()
        client.connect(server.getsockname())
        return time.monotonic() - begin


@pytest.mark.parametrize("ranks", [1, 17])
def test_too_few_and_too_many_ranks(ranks: int) -> None:
    with pytest.raises(InputError, match=rf"emulation of {ranks} ranks is not possible; choose 2 to 16"):
        Emulation([None] * ranks)  # type: ignore[list-item]


# The command.


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


def thinwire(*arguments: str) -> Any:
    """Run the program within this process."""
    return CliRunner(env={"NO_COLOR": "1", "TERM": "dumb"}).invoke(app, list(arguments))


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
        Emulation([net_profile()] * 2),
    ):
        pass


def net_profile():
    from thinwire.lab.emulator.profile import Profile

    return Profile.parse("100mbit")


# A machine that does not keep time, and processes that are killed.


def relay_pid() -> int:
    (pid,) = [p for p in children(os.getpid()) if "emulator.isolation" in command_line(p)]
    return pid


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_a_late_run_is_no_result() -> None:
    """A relay that is held up while packets are due has been late, whatever held it up."""
    with emulation("100mbit,20ms") as net:
        net.verdict()
        for _ in range(3):
            connecting = threading.Thread(target=trip, args=(net,))
            connecting.start()
            time.sleep(0.01)
            os.kill(relay_pid(), signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(relay_pid(), signal.SIGCONT)
            connecting.join(30)
    assert net.lateness().worst > 0.1
    assert net.describe()["valid"] is False
    with pytest.raises(MeasurementError, match=r"too busy to keep time: packets were \d+\.\d+ ms late"):
        net.verdict()


def test_without_its_relay_nothing_is_valid() -> None:
    with emulation("100mbit,1ms") as net:
        threading.Timer(1.0, os.kill, (relay_pid(), signal.SIGKILL)).start()
        with pytest.raises(MeasurementError, match="relay ended by SIGKILL"):
            run_ranks(net, ["sleep", "300"])
    with pytest.raises(MeasurementError, match="relay ended by SIGKILL"):
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
    command = [sys.executable, "-m", "thinwire", "emulate", "--link", "100mbit,1ms", "--no-check"]
    end = time.monotonic() + TURN
    while True:
        p = cold(place, *command, "--", "sh", "-c", program)
        mark = orphans.mark(p.pid)
        until(lambda: p.poll() is not None or len(marked(mark)) == 5, "the ranks to run")  # noqa: B023
        if p.poll() is None:
            return p, mark
        assert BUSY in p.err or INSTEAD in p.err, p.err
        if INSTEAD in p.err or time.monotonic() > end:
            pytest.skip(p.err.strip())
        time.sleep(0.5)


def marked(mark: str) -> list[int]:
    """Return the processes of an emulation: its relay, and on each of two ranks a command and its child."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if f"{orphans.MARK}={mark}".encode() in variables and (entry / "ns").exists():
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
    """Where relay and owner were killed at once, processes in the background can stay."""
    p, mark = start_and_wait(tmp_path)
    relay = next(pid for pid in marked(mark) if "emulator.isolation" in command_line(pid))
    os.kill(relay, signal.SIGSTOP)  # so that it cannot sweep
    p.signal(signal.SIGKILL)
    p.wait()
    os.kill(relay, signal.SIGKILL)
    until(lambda: len(marked(mark)) == 2, "the ranks' own end")
    variables = os.environ | {orphans.MARK: orphans.mark(os.getpid())}
    with subprocess.Popen(["sleep", "1234"], env=variables) as own:
        found = {o.pid for o in orphans.orphans()}
        assert set(marked(mark)) <= found and own.pid not in found
        run = thinwire("emulate", "--clean")
        assert run.exit_code == 0 and run.stderr.count("sleep 1234") >= 2
        assert not marked(mark) and own.poll() is None
        own.kill()
    assert "nothing was left behind" in thinwire("emulate", "--clean").stderr
