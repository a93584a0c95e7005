"""Where and in what a rank computes: a device, the dtype of autocast, and what crosses between stages."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self

import torch

from thinwire.runs.machine.devices import CPU, compute_dtype, is_card

HOST = torch.device(CPU)
LOSS_SCALE = 1024.0  # of float16: smaller gradients round to zero, and a power of two rounds nothing


@dataclass(frozen=True)
class Compute:
    """A device and the ``dtype`` of its matrix products; weights, sums and optimiser states are float32.

    ``crossing``: the dtype in which hidden states and their gradients go from stage to stage.

    >>> with Compute(dtype=torch.bfloat16).autocast():
    ...     torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype
    torch.bfloat16
    """

    device: torch.device = HOST
    dtype: torch.dtype = torch.float32
    crossing: torch.dtype = torch.float32

    @classmethod
    def of(cls, device: torch.device, asked: str) -> Self:
        """Return it for a device and a ``--dtype``."""
        return cls(device, compute_dtype(asked, device))

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before, and gradients are divided by after they are computed."""
        return LOSS_SCALE if self.dtype == torch.float16 else 1.0

    def autocast(self) -> AbstractContextManager[object]:
        """Compute in ``dtype`` in the block."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def among(self, others: Sequence[Compute]) -> Self:
        """Return it with the ``crossing`` of a pipeline of these: their dtype, where all are cards with one.

        Between processors, and where one takes part, hidden states cross in float32.
        """
        dtypes = {other.dtype if is_card(other.device) else torch.float32 for other in others}
        return dataclasses.replace(self, crossing=dtypes.pop() if len(dtypes) == 1 else torch.float32)

    def wait(self) -> None:
        """Wait until the device has done what it was told, as whoever measures time must."""
        if is_card(self.device) and self.device.type != "meta":
            torch.accelerator.synchronize(self.device)


ON_CPU = Compute()


@contextlib.contextmanager
def computing_threads(many: int) -> Iterator[None]:
    """Compute with so many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(many)
    try:
        yield
    finally:
        torch.set_num_threads(before)
