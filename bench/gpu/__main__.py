"""Measure thinwire on one CUDA GPU, part by part: ``python -m bench.gpu``.

Each part is a process of its own with at most 90 seconds. It prints its rows as it goes, and they are stored
at once. ``--smoke`` does the same with tiny shapes on the CPU, to see that it runs, and stores nothing unless
``--out`` says where. ``--parts`` names those to run; what other parts found before stays in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from bench.gpu.ranks import MARK
from bench.ground.codecs import machine
from bench.study.cells import RESULTS, ROOT
from thinwire.runs.records.writer import read_json, write_json

# In the order of what is wanted most, should time run out: eight minutes in all.
PARTS = ("kernels", "video", "pictures", "replicas", "state", "stages", "links", "stages_xl", "pictures_full")
LIMIT = 90.0  # seconds a part
FILE = RESULTS / "gpu.json"


def main() -> int:
    """Run the parts, print and store their rows; return how many failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds a part")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        raise SystemExit("bench.gpu needs a CUDA GPU, and torch sees none; --smoke tries it on the CPU")
    file = args.out or (None if args.smoke else FILE)
    failed = []
    for part in args.parts:
        found = run(part, args.smoke, args.limit)
        failed += [part] * (not found["rows"] or any("error" in r for r in found["rows"]))
        if file is not None:
            keep(file, part, found)
    print(
        f"{len(args.parts) - len(failed)} of {len(args.parts)} parts whole" + f"; not {failed}" * bool(failed)
    )
    return len(failed)


def run(part: str, smoke: bool, limit: float) -> dict[str, Any]:
    """Return the rows of a part, and where and how long it ran."""
    command = [sys.executable, "-u", "-m", "bench.gpu.parts", part, *["--smoke"] * smoke]
    print(f"== {part}", flush=True)
    start, rows = time.monotonic(), list[dict[str, Any]]()
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    stop = stopping(child, limit)
    for line in child.stdout or ():
        print(line, end="", flush=True)
        if line.startswith(MARK):
            rows.append(json.loads(line.removeprefix(MARK)))
    code = child.wait()
    late = not stop.is_alive()
    stop.cancel()
    taken = time.monotonic() - start
    print(
        f"== {part}: {len(rows)} rows in {taken:.0f} s" + ", stopped" * late + f", exit {code}" * bool(code)
    )
    return {"rows": rows, "seconds": round(taken, 1), "whole": not late and not code, **where(smoke)}


def stopping(child: subprocess.Popen[str], limit: float) -> threading.Timer:
    """Return a timer that ends a part, and all processes that it started, after ``limit`` seconds."""
    timer = threading.Timer(limit, lambda: os.killpg(child.pid, signal.SIGKILL))
    timer.daemon = True
    timer.start()
    return timer


def where(smoke: bool) -> dict[str, Any]:
    """Return the device, torch and commit that a part was measured with."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    device = "cpu, smoke run" if smoke else torch.cuda.get_device_name()
    return {"device": device, "machine": machine(), "commit": head.stdout.strip()}


def keep(file: Path, part: str, found: dict[str, Any]) -> None:
    """Store what a part found beside what others did."""
    record = read_json(file) if file.exists() else {}
    record.setdefault("parts", {})[part] = found
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, record)


if __name__ == "__main__":
    sys.exit(main())
