"""A layer of a packed scene: what decodes to a scene, as named streams of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Layer:
    """What one coder made of a scene.

    ``codec`` names who reads it, ``count`` its splats, ``bands`` its bands of harmonics; ``about`` are plain
    JSON values that reading needs; ``streams`` are the bytes by name.
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
