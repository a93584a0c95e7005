"""What the inputs of a model's call say: their checksums, their shapes, and the time of the step."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator, Mapping
from numbers import Real

from torch import Tensor

from thinwire.uses.pictures.context_parallel.weights import bytes_of


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


def checksums(inputs: Mapping[str, object]) -> dict[str, int]:
    """Return a checksum of each input: of all bits of its tensors, and of its numbers and texts."""
    found: dict[str, int] = {}
    for name, x in leaves_of(inputs):
        own = name[1:].partition(".")[0]
        crc = found.get(own, 0)
        if isinstance(x, Tensor):
            crc = zlib.crc32(f"{name} {x.dtype} {tuple(x.shape)}".encode(), crc)
            found[own] = zlib.crc32(bytes_of(x), crc)
        elif isinstance(x, Real | str):
            found[own] = zlib.crc32(f"{name} {x}".encode(), crc)
    return found


def shapes_of(inputs: Mapping[str, object]) -> Hashable:
    """Return the tensors' names and shapes."""
    return tuple((name, tuple(x.shape)) for name, x in leaves_of(inputs) if isinstance(x, Tensor))


def time_of(inputs: Mapping[str, object]) -> float | None:
    """Return the latest time that the call is for, None where the model takes none.

    >>> import torch
    >>> time_of({"timesteps": torch.tensor([999.0, 980.0])})  # as HiDream calls it
    999.0
    """
    time = inputs.get("timestep", inputs.get("timesteps"))
    if isinstance(time, Tensor) and time.numel():
        return float(time.max())
    return float(time) if isinstance(time, Real) else None
