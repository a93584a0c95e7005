"""A frame: the samples of one message as rows of a tensor, the keys they go by, and what is kept for each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import index

import torch
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.memory import Memory
from thinwire.types import MAX_KEY, InputError, require

SHARED = 0  # the one key of a shared memory


def check_sendable(x: Tensor) -> None:
    """Raise ``InputError`` unless a packet can describe ``x``."""
    if x.dtype not in wire.CODES:
        raise InputError(f"a tensor of {x.dtype} cannot be sent; cast it, such as to float32")
    if not 0 < x.dim() <= wire.MAX_DIMENSIONS:
        raise InputError(
            f"a tensor of {x.dim()} dimensions cannot be sent; give 1 to {wire.MAX_DIMENSIONS}, samples first"
        )


def sample_ids(keys: Iterable[int]) -> list[int]:
    """Return the ids of samples as plain numbers; ``InputError`` unless they are whole and below 2**63."""
    try:
        found = [index(k) for k in keys]
    except TypeError as e:
        raise InputError(f"sample ids are whole numbers, got {repr(keys)[:80]}") from e
    if found and not 0 <= min(found) <= max(found) < MAX_KEY:
        raise InputError(f"sample ids are numbers from 0 to 2**63 - 1, got {min(found)} to {max(found)}")
    return found


def row_ids(keys: Iterable[int], n: int) -> list[int]:
    """Return the ids of ``n`` rows, one at least; ``InputError`` unless they are as many distinct ones."""
    found = sample_ids(keys)
    if not len(set(found)) == len(found) == n > 0:
        raise InputError(f"{n} rows need as many distinct sample ids, got {found[:8]}")
    return found


def state_keys(mem: Memory, keys: Sequence[int], slots: Sequence[int] | None) -> list[int]:
    """Return under which key the state of each sample is kept."""
    if mem.shared:
        return [SHARED] * len(keys)
    if mem.key == "sample":
        return list(keys)
    slots = range(len(keys)) if slots is None else slots
    require(len(slots) == len(keys), InputError, f"{len(keys)} samples need as many slots, got {len(slots)}")
    return sample_ids(slots)


def check_finite(x: Tensor) -> None:
    """Raise ``InputError`` for a NaN or an infinity in what will be remembered: no later message mends it."""
    if x.numel() and not all(math.isfinite(bound) for bound in torch.aminmax(x)):  # a NaN is both
        raise InputError("a NaN or infinite value cannot be remembered; look for the overflow that made it")


def checks(x: Tensor) -> list[int]:
    """Return a 32-bit sum for each row of ``x`` [B, ...], float32: equal bits, equal sums."""
    words = x.contiguous().view(torch.int32).reshape(len(x), math.prod(x.shape[1:]))
    return [v & 0xFFFFFFFF for v in words.sum(1, dtype=torch.int32).cpu().tolist()]  # modulo 2**32


def some_rows(x: Tensor, rows: list[int]) -> Tensor:
    """Return these rows of ``x``, itself where they are all."""
    return x if len(rows) == len(x) else x[rows]


def merged(outputs: list[tuple[list[int], Tensor]]) -> Tensor:
    """Return the tensor of which each output has some rows."""
    if len(outputs) == 1:
        return outputs[0][1]
    first = outputs[0][1]
    x_hat = first.new_empty((sum(len(rows) for rows, _ in outputs), *first.shape[1:]))
    for rows, x in outputs:
        x_hat[rows] = x
    return x_hat
