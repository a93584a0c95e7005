"""Keys of references: guidance stream, layer, tensor and source, packed in one whole number."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

STREAMS = 16  # of one generation
_LAYER, _TENSOR, _SOURCE = 16, 8, 16  # bits


class Kind(IntEnum):
    """What is exchanged."""

    KEYS = 0
    VALUES = 1
    OUTPUT = 2
    MASK = 3
    QUERIES = 4
    HIDDEN = 6
    FOUND = 5  # what attention returns
    TOKENS = 7  # to experts
    MADE = 8  # by experts
    CHOICES = 9  # which experts are meant


class Key(NamedTuple):
    """What a reference belongs to. ``layer`` counts the exchanges of a call of the model.

    >>> hex(Key(stream=1, layer=7, kind=Kind.VALUES, source=2).pack())
    '0x10007010002'
    """

    stream: int
    layer: int
    kind: Kind
    source: int

    def pack(self) -> int:
        """Return the key as ``Sender`` and ``Receiver`` take it."""
        return ((self.stream << _LAYER | self.layer) << _TENSOR | self.kind) << _SOURCE | self.source
