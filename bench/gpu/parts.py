"""One part of the measurement, as a process of its own: ``python -m bench.gpu.parts NAME [--smoke]``."""

from __future__ import annotations

import argparse
import importlib

import torch

# Module and its arguments by part.
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kernels": ("kernels", ()),
    "links": ("throughput", ()),
    "stages": ("two_stages", ("gpt2-medium",)),
    "stages_xl": ("two_stages", ("gpt2-xl",)),
    "replicas": ("replicas", ()),
    "state": ("states", ()),
    "pictures": ("pictures", ("small",)),
    "video": ("video", ()),
    "pictures_full": ("pictures", ("full",)),
}


def main() -> None:
    """Measure the part that the command names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    module, given = PARTS[args.part]
    device = torch.device("cpu" if args.smoke else "cuda")
    importlib.import_module(f"bench.gpu.{module}").measure(device, args.smoke, *given)


if __name__ == "__main__":
    main()
