"""What goes with each version of a part of a sharded state: which parts and versions belong together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from thinwire.state.patches.patch import Meta
from thinwire.types import InputError

KEY = "shards"  # in a version's meta data
_TEXT = re.compile(r"(?P<run>[0-9a-f]{16}) (?P<number>\d{1,15}) (?P<part>\d{1,6})/(?P<parts>\d{1,6})")


class Mark(NamedTuple):
    """The ``number``-th version of a ``run`` of the trainer: ``part`` of ``parts`` of it, from 1 on.

    ``step``: as its publisher was told, and is not in the text.

    >>> str(Mark("9f" * 8, 12, 3, 8))
    '9f9f9f9f9f9f9f9f 12 3/8'
    """

    run: str
    number: int
    part: int
    parts: int
    step: object = None

    def __str__(self) -> str:
        return f"{self.run} {self.number} {self.part}/{self.parts}"

    @property
    def version(self) -> tuple[str, int]:
        """What all parts of a version have in common."""
        return self.run, self.number

    @classmethod
    def of(cls, meta: Meta, peer: str) -> Mark:
        """Return the mark in a version's meta data. Errors: ``InputError`` with the peer that has none."""
        found = _TEXT.fullmatch(str(meta.get(KEY, "")))
        if found is None:
            raise InputError(f"{peer} publishes a whole state, and no shards; follow it with Follower")
        number, part, parts = (int(found[key]) for key in ("number", "part", "parts"))
        return cls(found["run"], number, part, parts, meta.get("step"))


def without(meta: Meta) -> dict[str, str | int | float]:
    """Return a version's meta data as its publisher was given them."""
    return {key: value for key, value in meta.items() if key != KEY}


def own(mapping: Mapping[str, object]) -> None:
    """Raise ``InputError`` where a caller's meta data has the key of the mark."""
    if KEY in mapping:
        raise InputError(f"meta {KEY!r} is what tells parts of a version apart; give another name")
