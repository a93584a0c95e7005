"""What one way takes of a rank: its resident set, the weights it holds, and what its GPU has allocated."""

from __future__ import annotations

import os

import torch
from torch import nn

from thinwire.runs.machine.devices import CUDA
from thinwire.runs.machine.processor import forget_peak, peak_rss_bytes, resident_peak
from thinwire.runs.records.run_record import PeakMemory


def forget(device: torch.device) -> None:
    """Let the peaks of this process begin anew, as far as the system can."""
    forget_peak()
    if device.type == CUDA:
        torch.cuda.reset_peak_memory_stats(device)


def taken(model: nn.Module, device: torch.device) -> list[int]:
    """Return bytes: the peak of the resident set, the weights that are here, the most a GPU allocated."""
    weights = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    allocated = torch.cuda.max_memory_allocated(device) if device.type == CUDA else 0
    return [resident_peak(os.getpid()) or peak_rss_bytes(), weights, allocated]


def most(repeats: list[list[list[int]]]) -> PeakMemory:
    """Return the most that each rank took, of what ``taken`` found: by repeat, then by rank.

    >>> most([[[5, 1, 0], [7, 1, 0]], [[6, 1, 0], [6, 1, 0]]]).peak_rss_bytes
    [6, 7]
    """
    ranks = [[max(found) for found in zip(*of_rank, strict=True)] for of_rank in zip(*repeats, strict=True)]
    return PeakMemory(*map(list, zip(*ranks, strict=True)))
