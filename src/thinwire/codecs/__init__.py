"""Codecs, and the registry that reads their specs back.

Each is imported at first use: whoever needs Zstandard frames alone needs no torch.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire import spec

if TYPE_CHECKING:
    from thinwire.codecs.chunks import ChunkTopK
    from thinwire.codecs.codec import (
        Codec,
        FixedRate,
        Layout,
        check_layout,
        fixed_layout,
        is_finite,
        is_fixed_rate,
        layout_nbytes,
        roundtrip,
        tuned,
    )
    from thinwire.codecs.deadzone import DeadZone
    from thinwire.codecs.entropy import Entropy
    from thinwire.codecs.fixpoint import FixedPoint
    from thinwire.codecs.frames import FrameChain
    from thinwire.codecs.matrices.factors import Factors
    from thinwire.codecs.matrices.lowrank import LowRank
    from thinwire.codecs.matrices.rankone import RankOne
    from thinwire.codecs.raw import Cast, Raw
    from thinwire.codecs.sparse import HardThreshold, InTurn, RandomK, Rows, TopK
    from thinwire.codecs.tiles import TileAdaptive
    from thinwire.codecs.transform import ChannelMean, Hadamard, Sink
    from thinwire.codecs.uniform import Uniform

    REGISTRY: dict[str, type]

_HOMES = {
    "Raw": "raw",
    "Cast": "raw",
    "Uniform": "uniform",
    "DeadZone": "deadzone",
    "TopK": "sparse",
    "ChunkTopK": "chunks",
    "InTurn": "sparse",
    "RandomK": "sparse",
    "HardThreshold": "sparse",
    "Hadamard": "transform",
    "ChannelMean": "transform",
    "Sink": "transform",
    "FrameChain": "frames",
    "Entropy": "entropy",
    "FixedPoint": "fixpoint",
    "TileAdaptive": "tiles",
    "RankOne": "matrices.rankone",
    "LowRank": "matrices.lowrank",
    "Rows": "sparse",
    "Factors": "matrices.factors",
}
_CODECS = tuple(_HOMES)
_HOMES |= dict.fromkeys(
    (
        "Codec",
        "FixedRate",
        "Layout",
        "check_layout",
        "fixed_layout",
        "is_finite",
        "is_fixed_rate",
        "layout_nbytes",
        "roundtrip",
        "tuned",
    ),
    "codec",
)


def parse_codec(text: str) -> Codec:
    """Return the codec that a spec such as ``Uniform(bits=4, group=32)`` describes.

    Errors: ``PayloadError`` where the text is not the spec of a registered codec.

    >>> parse_codec("Cast(dtype='bfloat16')")
    Cast(dtype='bfloat16')
    """
    return _parsed(text, tuple(_known().values()))  # one that was registered anew is another


@lru_cache(maxsize=256)
def _parsed(text: str, known: tuple[type, ...]) -> Codec:
    from thinwire.codecs.codec import Codec

    codec: Codec = spec.parse(text, _known(), Codec, "a codec")
    return codec


def _known() -> dict[str, type]:
    found: dict[str, type] = sys.modules[__name__].REGISTRY
    return found


def __getattr__(name: str) -> Any:
    if name == "REGISTRY":
        value: Any = {own: _found(own) for own in _CODECS}
    elif name in _HOMES:
        value = _found(name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _found(name: str) -> Any:
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "REGISTRY",
    "Cast",
    "ChannelMean",
    "ChunkTopK",
    "Codec",
    "DeadZone",
    "Entropy",
    "Factors",
    "FixedPoint",
    "FixedRate",
    "FrameChain",
    "Hadamard",
    "HardThreshold",
    "InTurn",
    "Layout",
    "LowRank",
    "RandomK",
    "RankOne",
    "Raw",
    "Rows",
    "Sink",
    "TileAdaptive",
    "TopK",
    "Uniform",
    "check_layout",
    "fixed_layout",
    "is_finite",
    "is_fixed_rate",
    "layout_nbytes",
    "parse_codec",
    "roundtrip",
    "tuned",
]
