"""Links, one way, loopback, unshaped: GB/s of equal messages. The card has no part in it."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu.ranks import RANKS, row, two_ranks
from thinwire.links import connect_mesh

SIZES = (1 << 16, 1 << 20, 1 << 26)
TOTAL = 1 << 31  # bytes a size
TURNS = 3


def measure(device: torch.device, smoke: bool) -> None:
    """Print the best of a few turns of each size."""
    two_ranks(_send, 1 << 24 if smoke else TOTAL)


def _send(rank: int, store: Any, total: int) -> None:
    peers = connect_mesh(rank, RANKS, dist.PrefixStore("links", store))
    peer = peers[1 - rank]
    for size in SIZES:
        count, best = max(4, total // size), 0.0
        data = os.urandom(size)
        for turn in range(TURNS):
            dist.barrier()
            start, spent = time.perf_counter(), time.process_time()
            if rank == 0:
                sent = [peer.mailbox.send(_tag(size, turn, i), data) for i in range(count)]
                for each in sent:
                    each.result(60.0)
                taken = time.perf_counter() - start
                if (speed := count * size / taken / 1e9) > best:
                    best, cpu = speed, (time.process_time() - spent) / (count * size / 1e9)
            else:
                for i in range(count):
                    peer.get(_tag(size, turn, i), 60.0, "a message")
        if rank == 0:
            row(message_bytes=size, gb_s=round(best, 3), cpu_seconds_a_gb=round(cpu, 3))


def _tag(size: int, turn: int, number: int) -> bytes:
    return f"T{size}/{turn}/{number}".encode()
