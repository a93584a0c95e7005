"""Working memory that a thread keeps, for temporaries that never leave a function.

A fresh megabyte often comes from the kernel page by page, which then costs more than what is computed in it.
On an accelerator torch keeps freed memory itself.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

BLOCK = 1 << 18  # values to work on at a time on a CPU: enough to hide call overhead, and near its caches

_kept = threading.local()


def block_rows(rows: int, width: int, device: torch.device) -> int:
    """Return how many rows of ``width`` values to work on at a time: all of them on an accelerator."""
    return max(1, BLOCK // max(1, width)) if device.type == "cpu" else max(1, rows)


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, slot: int = 0) -> Tensor:
    """Return uninitialised memory; the next call with the same ``slot`` in this thread returns it again."""
    nbytes = dtype.itemsize
    for n in shape:
        nbytes *= n
    if device.type != "cpu" or nbytes > 4 * BLOCK:
        return torch.empty(shape, dtype=dtype, device=device)
    slots: dict[int, Tensor] = _kept.__dict__.setdefault("slots", {})
    if slot not in slots or slots[slot].numel() < nbytes:
        with torch.inference_mode(False):  # what is made in that mode may not be written to outside it
            slots[slot] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return slots[slot][:nbytes].view(dtype).view(shape)
