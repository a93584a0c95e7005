"""What the inputs of a model's call say: their checksum, their shapes, and the time of the step."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Hashable, Iterator, Mapping
from numbers import Real

import torch
from torch import Tensor, nn

from thinwire.codecs.base import in_a_row

SAMPLES = 64  # values of a parameter that its checksum reads


def leaves_of(inputs: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield what is in nested arguments, by name."""
    if isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from leaves_of(value, f"{name}.{key}")
    elif isinstance(inputs, list | tuple):
        for i, value in enumerate(inputs):
            yield from leaves_of(value, f"{name}.{i}")
    else:
        yield name, inputs


def checksum(inputs: Mapping[str, object]) -> int:
    """Return a checksum of all bits of the tensors, and of numbers and texts."""
    crc = 0
    for name, x in leaves_of(inputs):
        if isinstance(x, Tensor):
            crc = zlib.crc32(f"{name} {x.dtype} {tuple(x.shape)}".encode(), crc)
            crc = zlib.crc32(_bytes(x), crc)
        elif isinstance(x, Real | str):
            crc = zlib.crc32(f"{name} {x}".encode(), crc)
    return crc


def shapes_of(inputs: Mapping[str, object]) -> Hashable:
    """Return the tensors' names and shapes."""
    return tuple((name, tuple(x.shape)) for name, x in leaves_of(inputs) if isinstance(x, Tensor))


def time_of(inputs: Mapping[str, object]) -> float | None:
    """Return the latest time that the call is for, None where the model takes none.

    >>> time_of({"timesteps": torch.tensor([999.0, 980.0])})  # as HiDream calls it
    999.0
    """
    time = inputs.get("timestep", inputs.get("timesteps"))
    if isinstance(time, Tensor) and time.numel():
        return float(time.max())
    return float(time) if isinstance(time, Real) else None


def weights_checksum(model: nn.Module, but: Collection[int] = ()) -> int:
    """Return a checksum of a few values of every parameter; of what lies on no device, of the shape alone.

    Parameters whose ``id`` is in ``but`` are left out.
    """
    crc = 0
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if id(p) in but:
            continue
        crc = zlib.crc32(f"{name} {p.dtype} {tuple(p.shape)}".encode(), crc)
        if p.numel() and p.device.type != "meta":
            crc = zlib.crc32(_bytes(p.detach().flatten()[:: -(-p.numel() // SAMPLES)]), crc)
    return crc


def _bytes(x: Tensor) -> memoryview:
    return in_a_row(x).cpu().view(torch.uint8).numpy().data
