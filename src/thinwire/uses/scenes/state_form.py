"""A packed scene as a state of fixed uint8 tensors, which versions bring layer by layer.

The header is a tensor and each layer is one; layers still to come are zero, which takes next to no bytes. A
version says how many layers it has, so that whoever holds it can write them as a packed scene.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.types import PayloadError, require
from thinwire.uses.scenes.files.packed_scene import read_outline

HEADER, LAYER = "scene.header", "scene.layer."


class LayeredScene:
    """A packed scene, all of it. Errors: ``PayloadError`` for any other bytes."""

    def __init__(self, data: bytes) -> None:
        outline = read_outline(data)
        ends = [outline.begin, *(layer.end for layer in outline.layers)]
        require(len(data) == ends[-1], PayloadError, f"{len(data)} bytes of a scene of {ends[-1]}")
        self._parts = [data[: ends[0]], *(data[a:b] for a, b in pairwise(ends))]

    @property
    def count(self) -> int:
        """How many layers there are."""
        return len(self._parts) - 1

    def state(self, layers: int) -> dict[str, Tensor]:
        """Return the state [bytes] that has the first ``layers``."""
        names = [HEADER, *(f"{LAYER}{i}" for i in range(1, len(self._parts)))]
        return {
            name: torch.frombuffer(bytearray(part), dtype=torch.uint8)
            if i <= layers
            else torch.zeros(len(part), dtype=torch.uint8)
            for i, (name, part) in enumerate(zip(names, self._parts, strict=True))
        }


def layered(data: bytes) -> LayeredScene:
    """Return a packed scene as a state. Errors: as ``LayeredScene``."""
    return LayeredScene(data)


def scene_of(state: Mapping[str, Tensor], layers: object) -> bytes:
    """Return the beginning of a packed scene that a state with so many ``layers`` holds.

    Errors: ``PayloadError`` for the state of anything else.
    """
    good = type(layers) is int and layers > 0 and HEADER in state
    names = [HEADER, *(f"{LAYER}{i + 1}" for i in range(layers if isinstance(layers, int) else 0))]
    good = good and all(name in state and state[name].dtype == torch.uint8 for name in names)
    require(good, PayloadError, f"no scene of {layers!r:.20} layers")
    data = b"".join(state[name].numpy().tobytes() for name in names)
    found = read_outline(data).whole(len(data))
    require(found == layers, PayloadError, f"a scene of {found} layers, expected {layers}")
    return data
