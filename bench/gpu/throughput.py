"""Links, one way, loopback, unshaped: GB/s of equal messages. The card has no part in it."""

from __future__ import annotations

import torch

from bench.gpu.ranks import row
from bench.ground.throughput import SIZES, run

TOTAL = 1 << 30  # bytes of a turn
TURNS = 3


def measure(device: torch.device, smoke: bool) -> None:
    """Print the quickest of a few turns of each size."""
    for size in SIZES.values():
        count = max(4, (1 << 24 if smoke else TOTAL) // size)
        best = max(
            (run("thinwire", size, count, False, False) for _ in range(TURNS)), key=lambda r: r["rate"]
        )
        row(
            message_bytes=size,
            gb_s=round(best["rate"] / 1e9, 3),
            cpu_seconds_a_gb=round(best["sender"], 3),
        )
