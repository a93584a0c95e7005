"""Measure what references on disk cost a step: seconds to get and put a sample's, with and without prefetch.

Run ``python -m bench.ground.stores [--folder F] [--seconds 0.02]``. A data set of twenty times the store's
memory is visited in random order, a batch at a time; between two batches the trainer computes (here: sleeps),
while what was announced is read and what was put is written. The file's pages are dropped from the system's
cache before the visits marked cold. The stores take turns batch by batch. Writes
``bench/results/stores.json``; stopped between two shapes, it goes on with the next.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.ground.codecs import machine
from bench.study.cells import RESULTS, Cells
from bench.study.tables import columns
from thinwire.channels.disk import DiskStore
from thinwire.channels.references import References, Store, TensorStore
from thinwire.codecs import Uniform

RESULT = RESULTS / "stores.json"
SHAPES = {"SmolLM2-135M, 128 tokens": (1, 128, 576), "GPT2-XL, 1024 tokens": (1, 1024, 1600)}
TIMES = 20  # the data set, in memories of the store
BATCH = 8
MEMORY = 4 * BATCH  # references in memory: this batch and the next, waiting to be written or to be used


@dataclass
class Case:
    """A store, how it is used, and the seconds each sample took."""

    name: str
    store: Store
    announced: bool
    cold: bool
    get: list[float] = field(default_factory=list)
    put: list[float] = field(default_factory=list)
    resident: int = 0

    def __post_init__(self) -> None:
        self.references = References(Uniform(bits=8), self.store)

    def step(self, ids: list[int], upcoming: list[int], x: torch.Tensor) -> None:
        """Visit the samples ``ids``, and announce ``upcoming``."""
        if self.announced:
            self.references.prefetch(upcoming)
        for i in ids:
            payload = self.references.encode(x)
            self.get.append(seconds(lambda i=i: self.store.get(i)))
            self.put.append(seconds(lambda i=i, p=payload: self.references.put([i], p)))
        if isinstance(self.store, DiskStore):
            self.resident = max(self.resident, self.store.resident)


def seconds(work: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def fill(case: Case, n: int, x: torch.Tensor) -> float:
    """Put the whole data set; return the seconds until all but what stays in memory is written."""
    payload = case.references.encode(x)
    return seconds(lambda: [case.references.put([i], payload) for i in range(n)])


def forget_pages(store: Store) -> None:
    """Have the system write the store's file and drop it from its cache."""
    if isinstance(store, DiskStore):
        os.fdatasync(store._file._fd)
        os.posix_fadvise(store._file._fd, 0, 0, os.POSIX_FADV_DONTNEED)


def measure(shape: tuple[int, ...], folder: Path, compute: float, epochs: int) -> list[dict[str, Any]]:
    """Return one row a case."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    row = Uniform(bits=8).encode(x).nbytes
    memory, n = MEMORY * row, TIMES * MEMORY
    cases = [Case("memory", TensorStore(), False, False)] + [
        Case(f"disk{', announced' * announced}{', cold' * cold}", DiskStore(folder, memory), announced, cold)
        for announced in (False, True)
        for cold in (False, True)
    ]
    wrote = [fill(case, n, x) for case in cases]
    shuffle = random.Random(0)
    for _ in range(epochs):
        for case in cases:
            if case.cold:
                forget_pages(case.store)
        order = shuffle.sample(range(n), n)
        batches = [order[i : i + BATCH] for i in range(0, n, BATCH)]
        for ids, upcoming in zip(batches, [*batches[1:], []], strict=True):
            for case in cases:
                case.step(ids, upcoming, x)
                time.sleep(compute)
    rows = [line(c, row, memory, n * row / w / 1e6) for c, w in zip(cases, wrote, strict=True)]
    for case in cases:
        case.store.close()
    return rows


def line(case: Case, row: int, memory: int, rate: float) -> dict[str, Any]:
    """Return the record of one case, in microseconds a sample; the first batch was not announced."""
    get, put = case.get[BATCH:], case.put[BATCH:]
    return {
        "case": case.name,
        "row_bytes": row,
        "memory_bytes": memory,
        "largest_resident_bytes": case.resident,
        "fill_mb_s": round(rate, 1),
        "get_us": {"median": round(statistics.median(get) * 1e6, 1), "p95": round(p95(get) * 1e6, 1)},
        "put_us": {"median": round(statistics.median(put) * 1e6, 1), "p95": round(p95(put) * 1e6, 1)},
    }


seconds_of = columns(
    lambda rows: rows,
    ("store", "{case}"), ("get: median / 95 %, µs", "{get_us[median]:.0f} / {get_us[p95]:.0f}"),
    ("put: median / 95 %, µs", "{put_us[median]:.0f} / {put_us[p95]:.0f}"), ("fill, MB/s", "{fill_mb_s:.0f}"),
)  # fmt: skip


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    parser.add_argument("--seconds", type=float, default=0.02, help="of compute between two batches")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.zeros(31 << 18)  # 31 MB, dropped at once: see bench.ground.codecs
    settings = {"folder": str(args.folder), "seconds": args.seconds, "epochs": args.epochs}
    cells, found = Cells(args.out, settings), {}
    for name, shape in SHAPES.items():
        found[name] = cells.of(name, lambda s=shape: measure(s, args.folder, args.seconds, args.epochs))
        print(f"\n{name}: {found[name][0]['row_bytes'] / 1e6:.2f} MB a sample\n{seconds_of(found[name])}")
    cells.finish({"machine": machine(), "compute_seconds": args.seconds, "shapes": found})


if __name__ == "__main__":
    main()
