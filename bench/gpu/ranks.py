"""What the parts share: rows as lines of text, two ranks that share a card, and the clock."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from thinwire.runs.machine.compute import Compute

MARK = "ROW "  # what a line begins with that is a row
RANKS = 2
PATIENCE = timedelta(seconds=80)  # a part has 90 seconds


def row(**fields: Any) -> None:
    """Print a row at once, so that it counts even if the part is stopped behind it."""
    print(MARK + json.dumps(fields), flush=True)


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    Compute(device).wait()


def median_seconds(work: Callable[[], Any], device: torch.device, turns: int = 5, warm: int = 2) -> float:
    """Return the median time of a call, until the device has done it."""
    found = []
    for _ in range(warm + turns):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[warm:])


@contextmanager
def failing_alone(**fields: Any) -> Iterator[None]:
    """Let what fails in the block be a row that says why, and the next item go on."""
    try:
        yield
    except Exception as e:
        traceback.print_exc()
        row(**fields, error=f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}")


def two_ranks(function: Callable[..., None], *args: Any) -> None:
    """Call ``function(rank, store, *args)`` in two processes with a gloo group, and end them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_enter, (function, store.port, args), nprocs=RANKS)


def _enter(rank: int, function: Callable[..., None], port: int, args: tuple[Any, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 4))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    group = dist.PrefixStore("group", store)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=RANKS, timeout=PATIENCE)
    try:
        function(rank, store, *args)
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's gloo threads can abort an ordinary interpreter exit
