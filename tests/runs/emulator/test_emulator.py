"""Networks between namespaces: rates and delays as others measure them, losses, traces, environments."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import emulation
from emulated_lines import RECEIVER, SENDER, STREAM_IN, STREAM_OUT, trip
from launchers import until

from thinwire.links.shape import MTU, SEGMENT
from thinwire.runs.emulator import network_check
from thinwire.runs.emulator.network_check import DELAY_LIMIT, RATE_LIMIT, check_network
from thinwire.runs.emulator.session import Emulation
from thinwire.types import InputError, MeasurementError

serial = pytest.mark.serial

# What iperf3 and ping find; the whole grid is bench/ground/emulator.py's.


@serial
@pytest.mark.parametrize(
    ("mbit", "delay_ms", "congestion"),
    [(10, 50, "cubic"), (100, 5, "bbr"), pytest.param(500, 5, "cubic", marks=pytest.mark.long)],
)
def test_iperf_and_ping_find_what_was_asked_for(mbit: int, delay_ms: int, congestion: str) -> None:
    bench = pytest.importorskip("bench.ground.emulator")
    for program in ("iperf3", "ping"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    for _ in range(3):
        with emulation(f"{mbit}mbit,{delay_ms}ms", congestion=congestion) as net:
            trip = bench.round_trip(net, count=5)
            found = bench.goodput(net, seconds=3)
        if net.describe()["valid"]:
            break
    else:
        pytest.skip(f"the machine is too busy: {net.lateness()}")
    asked = mbit * 125e3 * SEGMENT / MTU
    assert found["congestion"] == congestion
    assert found["rate"] == pytest.approx(asked, rel=RATE_LIMIT)
    assert trip == pytest.approx(2e-3 * delay_ms, abs=DELAY_LIMIT)
    up = net.counters()[0].up
    assert up.passed.nbytes + up.dropped.nbytes > found["rate"] * 2  # headers and the warm-up on top


@serial
def test_the_check_sees_a_wrong_rate_and_a_wrong_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulation("20mbit,5ms") as net:
        good = net.check()
        assert good.congestion == "cubic" and len(good.links) == 1
        monkeypatch.setattr(network_check, "PATIENCE", 1.0)  # no longer for what never comes right
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


@serial
def test_unlimited_and_unequal_networks_are_checked_too() -> None:
    with emulation("none", "2=30mbit,10ms", ranks=3) as net:
        links = {(c.source, c.destination): c for c in net.check().links}
    assert set(links) == {(0, 1), (1, 2), (2, 0)}
    assert links[0, 1].rate_asked is None and links[0, 1].trip_asked == 0.0
    assert links[1, 2].trip_asked == pytest.approx(0.010, abs=1e-3)  # the mean of 0 and 10 ms, there and back
    assert links[2, 0].rate_found == pytest.approx(30 * 125e3 * SEGMENT / MTU, rel=RATE_LIMIT)


@serial
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


def underway(net: Emulation) -> int:
    """Return how many segments from rank 0 are on their way to rank 1."""
    up, down = net.counters()[0].up, net.counters()[1].down
    return up.passed.segments - up.lost.segments - down.passed.segments - down.dropped.segments


def test_of_what_tcp_sends_in_one_piece_single_segments_are_lost() -> None:
    """Over 1 Gbit/s there are up to 44 in one: were they lost together, ten times as many would be."""
    megabytes = "40"
    with emulation("1gbit,2ms,loss=0.5%", seed=3) as net:
        pipe = {"stdout": subprocess.PIPE, "text": True}
        receiver = net.popen(1, [sys.executable, "-c", STREAM_IN, megabytes], **pipe)
        assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
        net.restart()
        assert net.popen(0, [sys.executable, "-c", STREAM_OUT, net.address(1), megabytes]).wait(120) == 0
        assert receiver.communicate(timeout=120)[0] == "whole\n"
        until(lambda: underway(net) == 0, "the last of it to arrive")
        up = net.counters()[0].up
    assert up.passed.segments > 1.2 * up.passed.packets
    assert up.lost.segments == pytest.approx(0.005 * up.passed.segments, rel=0.35)


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


@serial
def test_a_trace_begins_anew_at_every_restart(tmp_path: Path) -> None:
    """A trace of 20 ms for 2 s, then of 100 ms; restarts always find its first row."""
    file = tmp_path / "step.csv"
    file.write_text("seconds,up_mbit,down_mbit,delay_ms\n0,100,100,10\n2,100,100,50\n6,100,100,50\n")
    with emulation(f"trace:{file}") as net:
        for _ in range(2):
            net.restart()
            assert trip(net) == pytest.approx(0.02, abs=0.015)
        until(lambda: net.state()["seconds"] > 2.2, "the trace's second row")
        assert trip(net) == pytest.approx(0.1, abs=0.025)
        before = net.state()
        net.rewind()
        trip(net)  # behind the end of the connection before, which is under way and not overtaken
        assert trip(net) == pytest.approx(0.02, abs=0.015)
        after = net.describe()
        assert before["trace_began"] == 0 and after["trace_began"] > 2.2
        passed = [s["counters"][0]["up"]["passed"]["packets"] for s in (before, after)]
        assert 0 < passed[0] < passed[1]  # counters go on


@pytest.mark.parametrize("ranks", [1, 17])
def test_too_few_and_too_many_ranks(ranks: int) -> None:
    with pytest.raises(InputError, match=rf"emulation of {ranks} ranks is not possible; choose 2 to 16"):
        Emulation([None] * ranks)  # type: ignore[list-item]
