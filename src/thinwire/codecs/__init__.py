"""Codecs, and the registry that reads their specs back."""

from __future__ import annotations

from functools import lru_cache

from thinwire import spec
from thinwire.codecs.base import Codec, FixedRate, Layout, check_layout, layout_nbytes
from thinwire.codecs.raw import Cast, Raw
from thinwire.codecs.uniform import Uniform
from thinwire.types import PayloadError

REGISTRY: dict[str, type] = {c.__name__: c for c in (Raw, Cast, Uniform)}


@lru_cache(maxsize=256)
def parse_codec(text: str) -> Codec:
    """Return the codec that a spec such as ``Uniform(bits=4, group=32)`` describes.

    Errors: ``PayloadError`` where the text is not the spec of a registered codec.

    >>> parse_codec("Cast(dtype='bfloat16')")
    Cast(dtype='bfloat16')
    """
    codec = spec.parse(text, REGISTRY)
    if not isinstance(codec, Codec):
        raise PayloadError(f"{text[:80]!r} is not a codec")
    return codec


__all__ = [
    "REGISTRY",
    "Cast",
    "Codec",
    "FixedRate",
    "Layout",
    "Raw",
    "check_layout",
    "layout_nbytes",
    "parse_codec",
]
