"""What is coded of a scene: parts, and layers that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Part:
    """What one coder made of some splats.

    ``codec`` names who reads it, ``count`` its splats, ``bands`` their bands of harmonics; ``about`` are JSON
    values that reading needs; ``streams`` are the bytes by name.
    """

    codec: str
    count: int
    bands: int
    about: Mapping[str, Any]
    streams: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all streams."""
        return sum(map(len, self.streams.values()))


@dataclass(frozen=True, eq=False)
class Layer:
    """What a receiver gets at a time: splats that stay, and others that stand in until the next layer.

    ``finer`` is what narrows the steps of all splats that stay of earlier layers. The scene after a layer is
    all that stays of it and those before it, and its own stand-in.
    """

    stays: Part | None = None
    stand_in: Part | None = None
    finer: Part | None = None

    @property
    def parts(self) -> dict[str, Part]:
        """The parts that there are, by name."""
        every = {"stays": self.stays, "stand_in": self.stand_in, "finer": self.finer}
        return {name: part for name, part in every.items() if part is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all streams."""
        return sum(part.nbytes for part in self.parts.values())
