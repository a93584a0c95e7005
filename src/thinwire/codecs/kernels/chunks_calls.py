"""Calls of the kernels of ``ChunkTopK``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs.kernels import triton_calls
from thinwire.codecs.kernels.bits import plane_count, wide_nbytes

LONGEST = 8192  # values of a run that a program can hold
_SIZE = 256


class Runs(NamedTuple):
    """Runs of ``chunk`` of ``n`` values, ``each`` of which are kept, ``of_last`` of a shorter one."""

    n: int
    chunk: int
    each: int
    of_last: int
    width: int  # bits of a position

    @property
    def kept(self) -> int:
        return self.n // self.chunk * self.each + self.of_last

    @property
    def m(self) -> int:
        return -(-self.kept // self.planes)

    @property
    def planes(self) -> int:
        return plane_count(self.width % 8) if self.width % 8 else 1


def there(runs: Runs, x: Tensor, reference: Tensor | None = None) -> bool:
    """Return whether kernels can choose from ``x``, or put on top of ``reference``."""
    return runs.n > 0 and runs.chunk <= LONGEST and triton_calls.there(x, reference)


def chosen(runs: Runs, x: Tensor, reference: Tensor | None, back: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed positions, the values there, and what they are put on top of if ``back``.

    Of ``x``, or of its difference to ``reference``: then the values are float32.
    """
    from thinwire.codecs.kernels.fused import selecting

    x, against, count = x.contiguous(), reference is not None, runs.kept
    held = x if reference is None else reference.contiguous()
    position = torch.empty(count, dtype=torch.int32, device=x.device)
    kept = torch.empty(count, dtype=held.dtype, device=x.device)
    restored = torch.empty_like(held) if back else x
    size = 1 << max(4, (runs.chunk - 1).bit_length())
    numbers = runs.n, runs.chunk, runs.each, runs.of_last
    programs, warps = (-(-runs.n // runs.chunk),), max(1, min(8, size // 512))
    tensors = (x, held, restored, position, kept)
    triton_calls.launch(selecting.largest_of_runs, programs, tensors, numbers, (size, against, back), warps)
    packed = torch.empty(wide_nbytes(count, runs.width), dtype=torch.uint8, device=x.device)
    triton_calls.launch(
        selecting.packed_positions,
        (-(-runs.m // _SIZE),),
        (position, packed),
        (count, runs.m),
        (runs.width, runs.planes, _SIZE),
    )
    return packed, kept, restored


def put(
    runs: Runs, packed: Tensor, kept: Tensor, restored: Tensor, reference: Tensor | None = None
) -> Tensor:
    """Put ``kept`` at packed positions into ``restored``, on top of ``reference`` or as it is.

    Return a flag: not 0 where positions do not increase within the tensor.
    """
    from thinwire.codecs.kernels.fused import selecting

    flags = torch.zeros(1, dtype=torch.int32, device=packed.device)
    held = restored if reference is None else reference.contiguous()
    triton_calls.launch(
        selecting.scattered,
        (-(-runs.kept // _SIZE),),
        (packed, kept.contiguous(), held, restored, flags),
        (runs.n, runs.kept, runs.m, runs.chunk, runs.each),
        (runs.width, _SIZE, reference is not None),
    )
    return flags[0]
