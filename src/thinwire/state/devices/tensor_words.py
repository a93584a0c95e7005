"""Words as torch has them: the integers that hold the bits of a dtype, and tensors in the memory of words."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinwire.dtypes import dtype_of
from thinwire.state.layout import BARE, Array, Slot

INTEGERS = {np.dtype(f"i{x.itemsize}"): x for x in (torch.int8, torch.int16, torch.int32, torch.int64)}
INSTEAD = {dtype_of(kind): INTEGERS[word] for kind, word in BARE.items()}  # of what has few operations


def taken(slot: Slot) -> torch.dtype:
    """Return what a slot's words are made from: its dtype, or integers where bits are all that counts."""
    return INTEGERS[slot.word] if slot.kind in BARE else slot.dtype


def tensor_of(kind: str, shape: tuple[int, ...], words: Array) -> Tensor:
    """Return words [n] as a tensor of the dtype ``kind``, in the same memory."""
    dtype = dtype_of(kind)
    with torch.inference_mode(False):  # else whoever leaves that mode could no longer write to it
        if not words.size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.from_numpy(words).view(dtype).view(shape)
