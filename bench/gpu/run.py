"""Measure thinwire on a CUDA GPU: the codecs as kernels, and two stages of a GPT-2 over a shaped link.

Run ``python -m bench.gpu.run``; ``--smoke`` does the same with tiny shapes on the CPU, to see that it runs.
Writes ``bench/results/gpu.json``; a smoke run nothing, unless ``--out`` says where. See the README beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bench.gpu import kernels, two_stages
from bench.ground.codecs import machine
from bench.study.cells import RESULTS
from bench.training.links import FIXED
from thinwire.runs.records.writer import write_json

SHAPES = ((1, 1024, 1024), (1, 1024, 1600))  # the boundary of GPT-2 medium and XL
LINKS = ("none", "1gbit", "500mbit", "300mbit", "100mbit")
RECIPES = FIXED  # those of the table of links; auto needs a whole run around it


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--rounds", type=int, default=30, help="of the kernels")
    parser.add_argument("--steps", type=int, default=5, help="that are timed, after two that are not")
    parser.add_argument("--models", nargs="+", default=["gpt2-medium", "gpt2-xl"])
    parser.add_argument("--links", nargs="+", default=LINKS)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure, print, store after each part."""
    args = parse()
    if not args.smoke and not torch.cuda.is_available():
        raise SystemExit("bench.gpu.run needs a CUDA GPU, and torch sees none; --smoke tries it on the CPU")
    device = torch.device("cpu" if args.smoke else "cuda")
    out = args.out or (None if args.smoke else RESULTS / "gpu.json")
    name = "cpu, smoke run" if args.smoke else torch.cuda.get_device_name()
    record: dict[str, Any] = {"machine": machine(), "device": name, "kernels": [], "two_stages": []}
    shapes, large = (((1, 16, 32),), 1 << 16) if args.smoke else (SHAPES, kernels.LARGE)
    for shape in shapes:
        record["kernels"] += kernels.measure(shape, device, args.rounds, not args.no_compile, large)
        show(record["kernels"][-len(kernels.CODECS) :])
        store(record, out)
    for model in ["tiny"] if args.smoke else args.models:
        batch = 4 if args.smoke else 8
        plan = two_stages.Plan(
            model, str(device), tuple(args.links), tuple(args.recipes), args.steps, batch, batch
        )
        record["two_stages"] += two_stages.measure(plan)
        show([row for row in record["two_stages"] if row["model"] == model])
        store(record, out)


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows one a line."""
    for row in rows:
        print("  ".join(f"{k}={v}" for k, v in row.items()))


def store(record: dict[str, Any], out: Path | None) -> None:
    """Write the record, so that what was measured so far is kept."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, record)


if __name__ == "__main__":
    main()
