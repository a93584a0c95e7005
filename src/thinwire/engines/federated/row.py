"""A model as one row: the parameters of a module, and packets of such a row, checked."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.channels import wire
from thinwire.channels.channel import Receiver
from thinwire.channels.memory import parse_memory
from thinwire.types import InputError, PayloadError, TensorSpec, require

ROOM = 4096  # bytes of framing that a packet may add to its values


class Parameters:
    """Read the trained parameters of a model as a row [1, N], float32, in the model's own order; write them.

    Errors: ``InputError`` where nothing is trained, a parameter is not float32, or the model keeps running
    means, as batch norm does: those of clients would not be averaged.

    >>> Parameters(nn.Linear(2, 1)).read().shape
    torch.Size([1, 3])
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        require(len(self._parameters) > 0, InputError, "the model has no parameter to train; unfreeze some")
        for name, p in model.named_parameters():
            fits = p.dtype == torch.float32 or not p.requires_grad
            require(fits, InputError, f"parameter {name} is {p.dtype}; cast what is trained to float32")
        for name, b in model.named_buffers():
            wrong = f"the model keeps {name}, which clients would not share; use group norm, or no norm"
            require(not name.endswith(("running_mean", "running_var")) or b is None, InputError, wrong)
        self.numel = sum(p.numel() for p in self._parameters)

    def read(self) -> Tensor:
        """Return the values [1, N], a copy on the CPU."""
        return torch.cat([p.detach().reshape(1, -1) for p in self._parameters], 1).cpu()

    def write(self, row: Tensor) -> None:
        """Copy [1, N] into the parameters, which do not share its memory. Errors: ``InputError``."""
        wrong = f"a row of shape {list(row.shape)} for a model of {self.numel} values; give [1, {self.numel}]"
        require(row.shape == (1, self.numel), InputError, wrong)
        parts = row.reshape(-1).split([p.numel() for p in self._parameters])
        with torch.no_grad():
            for p, part in zip(self._parameters, parts, strict=True):
                p.copy_(part.view(p.shape))


def most_nbytes(values: int) -> int:
    """Return the bytes that a packet of a row of ``values`` may have: raw, and a quarter for codes."""
    return 5 * values + ROOM


def unpack_row(data: bytes | memoryview, values: int, key: int) -> Tensor:
    """Return the row [1, ``values``], float32, in a packet of one entry named ``key`` that leaves no state.

    Errors: ``PayloadError`` for anything else, before anything larger than such a row is allocated.
    """
    most = most_nbytes(values)
    require(len(data) <= most, PayloadError, f"{len(data)} bytes for {values} values, at most {most} may be")
    packet = wire.unpack(data, max_nbytes=4 * values)
    keys = [e.key for e in packet.entries]
    require(keys == [key], PayloadError, f"a packet of the keys {keys[:4]} where {key} is expected")
    spec = TensorSpec((1, values))
    wrong = f"a packet of {packet.spec.dtype} and shape {packet.spec.shape} where {spec.shape} is expected"
    require(packet.spec == spec, PayloadError, wrong)
    wrong = f"a packet under {packet.memory[:40]}, which would leave state; such updates are not taken"
    require(not parse_memory(packet.memory).mirrored, PayloadError, wrong)
    return Receiver().decode(packet, expect=spec)
