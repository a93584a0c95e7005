"""A block of Wan 1.3B's shapes by patches, and the coding of a patch: what ``video.wan_times`` replays."""

from __future__ import annotations

import torch

from bench.gpu.ranks import failing_alone, row
from bench.video.wan_times import LATENT, PATCHES, SMALL, Cell
from bench.video.wan_times import measure as timed


def measure(device: torch.device, smoke: bool) -> None:
    """Print a row for each number of patches."""
    for patches in PATCHES:
        with failing_alone(patches=patches):
            row(patches=patches, **timed(Cell(device.type, patches), SMALL if smoke else LATENT))
