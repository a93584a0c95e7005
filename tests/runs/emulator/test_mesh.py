"""A script of one's own across an emulated network: what it needs to connect is in its environment."""

from __future__ import annotations

import sys

import pytest
from emulated import emulate, lacking

CODE = """
import os
import torch.distributed as dist
import thinwire
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store, _, _ = next(dist.rendezvous("env://", rank, world))
own = {"host": os.environ["THINWIRE_HOST"], "token": thinwire.read_token()}
peers = thinwire.connect_mesh(rank, world, store, **own)
other = 1 - rank
peers[other].mailbox.send(b"hello", b"from %d" % rank)
print(own["host"], peers[other].get(b"hello", 30.0, "a greeting").decode(), flush=True)
for peer in peers.values():
    peer.close()
"""


@pytest.mark.parametrize("token", ["", "the one that the user has set"])
def test_a_script_connects_with_the_address_and_the_token_it_finds(token: str) -> None:
    more = {"THINWIRE_TOKEN": token} if token else {}
    run = emulate("--link", "100mbit,2ms", "--no-check", "--", sys.executable, "-c", CODE, **more)
    if run.returncode == 2 and lacking(run.stderr):
        pytest.skip(run.stderr.strip())
    assert run.returncode in (0, 4), run.stderr  # 4: too busy a machine for times, which are not of interest
    assert "[0] 10.77.0.1 from 1" in run.stdout + run.stderr
    assert "[1] 10.77.0.2 from 0" in run.stdout + run.stderr


ESTIMATES = """
import os, sys, time
import torch.distributed as dist
import thinwire
from thinwire.collectives import MeshExchange
rank = int(os.environ["RANK"])
store, _, _ = next(dist.rendezvous("env://", rank, 2))
own = {"host": os.environ["THINWIRE_HOST"], "token": thinwire.read_token()}
peers = thinwire.connect_mesh(rank, 2, store, **own)
peer, exchange, step = peers[1 - rank], MeshExchange(rank, peers), 0
size, pause, count = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
rates = []
for _ in range(2):  # a machine that is busy just then spoils one
    peer.reliable.forget_estimate()
    time.sleep(0.3)
    peer.measure()
    for _ in range(count):
        step += 1
        exchange.post(step, os.urandom(size))
        exchange.collect(step, 30.0)
        time.sleep(pause)
    rates.append(peer.reliable.estimate().rate)
print("rates", *rates, flush=True)
exchange.drain(30.0)
peer.close()
"""


def test_small_messages_do_not_make_a_measured_line_look_slow() -> None:
    """The window of TCP's cubic, which shuts in pauses, would say 0.16 of it."""
    command = ("--", sys.executable, "-c", ESTIMATES, "50000", "1.0", "3")
    run = emulate("--link", "20mbit,30ms", "--no-check", *command)
    if run.returncode == 4 or (run.returncode == 2 and lacking(run.stderr)):
        pytest.skip(run.stderr.strip())
    assert run.returncode == 0, run.stderr
    lines = [line.partition("rates ")[2].split() for line in run.stdout.splitlines() if "rates " in line]
    assert len(lines) == 2
    for rates in lines:  # less TCP's headers
        assert any(float(rate) == pytest.approx(2.41e6, rel=0.2) for rate in rates), rates
