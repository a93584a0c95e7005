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
