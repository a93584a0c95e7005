"""The command thinwire relay, and whole runs through one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from launchers import listening, metrics, reached, record, sentence, until, warm
from relayed import LONG, TOKEN, exchange, mesh
from texts import write_text

from thinwire.links.relay.handshake import relay_pass


def relay_process(place: Path, *arguments: Any, **more: Any) -> tuple[Any, int]:
    """Start ``thinwire relay`` and return it and its port."""
    command = warm().start(place, "relay", "--host", "127.0.0.1", *arguments, **more)
    until(lambda: "relay listens at" in command.err or command.poll() is not None, "the relay", LONG)
    assert command.poll() is None, command.err
    line = next(line for line in command.err.splitlines() if "listens at" in line)
    return command, int(line.rpartition(":")[2])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path, how: signal.Signals) -> None:
    command, port = relay_process(tmp_path, "--port", 0, THINWIRE_TOKEN=TOKEN.decode())
    try:
        with mesh(f"127.0.0.1:{port}") as ranks:
            exchange(ranks)
            command.signal(how)
            assert command.wait(LONG) == 0
    finally:
        if command.poll() is None:
            command.signal(signal.SIGKILL)
    assert "relay ended: 3 connections, 1 passed on" in command.err
    assert command.out == ""


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ((), {}, "THINWIRE_TOKEN"),
        (("--port", 70000), {"THINWIRE_TOKEN": "x"}, "--port is 70000"),
        (("--max-connections", 1), {"THINWIRE_TOKEN": "x"}, "--max-connections is 1"),
        (("--host", "192.0.2.1"), {"THINWIRE_TOKEN": relay_pass(b"x")}, "cannot listen at 192.0.2.1:7000"),
        (("--show-pass",), {"THINWIRE_TOKEN": relay_pass(b"x")}, "a pass already"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, arguments: tuple[Any, ...], environment: dict[str, str], words: str
) -> None:
    command = warm().run(tmp_path, "relay", *arguments, **environment)
    assert command.code == 2
    assert words in sentence(command)


def test_show_pass_prints_the_pass_alone(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(TOKEN + b"\n")
    command = warm().run(tmp_path, "relay", "--show-pass", "--token-file", file)
    assert (command.code, command.out, command.err) == (0, relay_pass(TOKEN) + "\n", "")


def test_a_rank_number_that_is_none(tmp_path: Path) -> None:
    job = (
        "train",
        "--relay",
        "127.0.0.1:7000",
        "--model",
        "gpt2-lab",
        "--data",
        write_text(tmp_path / "text"),
    )
    command = warm().run(tmp_path, *job, RANK="first", WORLD_SIZE=2, THINWIRE_TOKEN=TOKEN.decode())
    assert command.code == 2
    assert "RANK is 'first'" in sentence(command)


@pytest.mark.slow
def test_a_run_through_a_relay_needs_no_address_of_any_rank(tmp_path: Path) -> None:
    """Two ranks with RANK and WORLD_SIZE alone; the losses are those of a run on one machine."""
    text = write_text(tmp_path / "text.txt")
    job = ["train", "--model", "gpt2-lab", "--data", text, "--batch", 4, "--microbatches", 2, "--seq", 32]
    job += ["--steps", 4, "--epochs", 2, "--eval-samples", 4, "--threads", 1, "--dtype", "fp32"]
    job += ["--no-save-model", "--quiet", "--no-tensorboard"]
    plain = warm().run(tmp_path / "plain", *job, "--out", tmp_path / "plain" / "out")
    assert plain.code == 0, plain.err
    relay, port = relay_process(tmp_path / "relay", "--port", 0, THINWIRE_TOKEN=relay_pass(TOKEN))
    try:
        ranks = [
            warm().start(
                tmp_path / f"rank-{rank}",
                *(*job, "--relay", f"127.0.0.1:{port}", "--out", tmp_path / f"out-{rank}"),
                RANK=rank,
                WORLD_SIZE=2,
                THINWIRE_TOKEN=TOKEN.decode(),
            )
            for rank in range(2)
        ]
        reached(tmp_path / "out-0", 1, *ranks)
        for r in ranks:
            assert r.poll() is not None or set(listening(r.pid)) <= {"0100007F"}, (
                "a rank listens off loopback"
            )
        assert [r.wait() for r in ranks] == [0, 0], ranks[0].err + ranks[1].err
    finally:
        relay.signal(signal.SIGTERM)
    assert relay.wait(LONG) == 0
    assert "1 passed on" in relay.err
    out = tmp_path / "out-0"
    assert len(metrics(out)) == 4
    assert record(out)["loss"] == record(tmp_path / "plain" / "out")["loss"]


# -- networks that have no way to each other

INSIDE = """
import ctypes, os, sys
space = os.open(f"/run/netns/{sys.argv.pop(1)}", os.O_RDONLY)
assert ctypes.CDLL(None).setns(space, 0) == 0
"""
RELAY = """
from thinwire.cli import main
main(["relay"])
"""
RANK = """
import socket
from thinwire.links import connect_mesh, read_token
rank, relay, other = int(sys.argv[1]), sys.argv[2], sys.argv[3]
try:
    socket.create_connection((other, 7000), timeout=2)
    print("reached", end=" ")
except ConnectionRefusedError:
    print("refused by the other rank itself", end=" ")
except OSError:
    pass
peers = connect_mesh(rank, 2, None, token=read_token(), relay=relay)
box = peers[1 - rank].mailbox
box.send(b"x", bytes([rank]) * 300_000, "forward")
got = box.get(b"x", 60.0, "the body")
peers[1 - rank].close()
print(len(got), got[0])
"""


def inside(space: str, *command: Any) -> list[str]:
    return ["ip", "netns", "exec", space, *map(str, command)]


@pytest.fixture
def islands() -> Iterator[tuple[str, list[str]]]:
    """Yield a network namespace for the relay, and two that reach it and not each other."""
    middle, *ends = spaces = [f"thinwire-test-{os.getpid()}-{i}" for i in range(3)]
    try:
        for space in spaces:
            ip("netns", "add", space)
        forwarding = "/proc/sys/net/ipv4/ip_forward"  # the host's setting is inherited
        subprocess.run(inside(middle, "sh", "-c", f"echo 0 > {forwarding}"), check=True, capture_output=True)
        for i, end in enumerate(ends):
            ip("link", "add", f"r{i}", "netns", middle, "type", "veth", "peer", "name", "e", "netns", end)
            ip("-n", middle, "addr", "add", f"10.77.{i}.1/24", "dev", f"r{i}")
            ip("-n", middle, "link", "set", f"r{i}", "up")
            ip("-n", end, "addr", "add", f"10.77.{i}.2/24", "dev", "e")
            ip("-n", end, "link", "set", "e", "up")
            ip("-n", end, "link", "set", "lo", "up")
            ip("-n", end, "route", "add", "default", "via", f"10.77.{i}.1")
        yield middle, ends
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"network namespaces are not to be had here: {e}")
    finally:
        for space in spaces:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "del", space], capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def test_ranks_in_networks_without_a_way_to_each_other(
    islands: tuple[str, list[str]], tmp_path: Path
) -> None:
    """The middle machine does not forward packets, so only connections to the relay itself can be made."""
    middle, ends = islands
    secret = {"THINWIRE_TOKEN": TOKEN.decode()}
    relay = warm().python(tmp_path, "-c", INSIDE + RELAY, middle, **secret)
    try:
        until(
            lambda: "relay listens at 0.0.0.0:7000" in relay.err or relay.poll() is not None,
            "the relay",
            LONG,
        )
        ranks = []
        for i, end in enumerate(ends):
            own = (end, i, f"10.77.{i}.1:7000", f"10.77.{1 - i}.2")
            ranks.append(warm().python(tmp_path / str(i), "-c", INSIDE + RANK, *own, **secret))
        assert [r.wait(2 * LONG) for r in ranks] == [0, 0], ranks[0].err + ranks[1].err
        assert [r.out for r in ranks] == ["300000 1\n", "300000 0\n"]
    finally:
        relay.signal(signal.SIGTERM)
        relay.wait(LONG)
