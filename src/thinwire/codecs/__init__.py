"""Codecs, and the registry that reads their specs back."""

from __future__ import annotations

from functools import lru_cache

from thinwire import spec
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
from thinwire.codecs.matrices.factors import Factors
from thinwire.codecs.matrices.lowrank import LowRank
from thinwire.codecs.matrices.rankone import RankOne
from thinwire.codecs.raw import Cast, Raw
from thinwire.codecs.sparse import HardThreshold, InTurn, RandomK, Rows, TopK
from thinwire.codecs.tiles import TileAdaptive
from thinwire.codecs.transform import ChannelMean, Hadamard, Sink
from thinwire.codecs.uniform import Uniform

_CODECS: tuple[type, ...] = (
    Raw,
    Cast,
    Uniform,
    DeadZone,
    TopK,
    ChunkTopK,
    InTurn,
    RandomK,
    HardThreshold,
    Hadamard,
    ChannelMean,
    Sink,
    Entropy,
    FixedPoint,
    TileAdaptive,
    RankOne,
    LowRank,
    Rows,
    Factors,
)
REGISTRY: dict[str, type] = {c.__name__: c for c in _CODECS}


def parse_codec(text: str) -> Codec:
    """Return the codec that a spec such as ``Uniform(bits=4, group=32)`` describes.

    Errors: ``PayloadError`` where the text is not the spec of a registered codec.

    >>> parse_codec("Cast(dtype='bfloat16')")
    Cast(dtype='bfloat16')
    """
    return _parsed(text, tuple(REGISTRY.values()))  # one that was registered anew is another


@lru_cache(maxsize=256)
def _parsed(text: str, known: tuple[type, ...]) -> Codec:
    codec: Codec = spec.parse(text, REGISTRY, Codec, "a codec")
    return codec


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
