"""Start ranks as forks of one process: ``fork_ranks.py PROGRAM RANKS STORE``.

Imports cost more than most checks. What rank 0 prints is in the file ``STORE.0``, and so on. A rank ends
when all have come through: what it sent last may still be on its way.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from contextlib import suppress
from multiprocessing import Barrier
from multiprocessing.synchronize import Barrier as Through
from threading import BrokenBarrierError

import pytest  # noqa: F401  # like all that follows, for the ranks
import torch._dynamo  # noqa: F401  # which DDP imports
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # noqa: F401

import thinwire.uses.training.replicas.script  # noqa: F401

LONG = 60.0  # seconds; a limit, not an expectation


def begin(program: str, rank: int, store: str, through: Through) -> int:
    """Return the process of a rank."""
    if pid := os.fork():
        return pid
    out = os.open(f"{store}.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = [program, str(rank), store]
    try:
        runpy.run_path(program, run_name="__main__")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    with suppress(BrokenBarrierError):
        through.wait(LONG)
    os._exit(0)


if __name__ == "__main__":
    program, world, store = sys.argv[1:]
    everyone = Barrier(int(world))
    for pid in [begin(program, rank, store, everyone) for rank in range(int(world))]:
        os.waitpid(pid, 0)
