"""Boxes: which part of a whole tensor a shard of it is, as it stands in the shard's name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from thinwire.types import InputError, require

_NAMED = re.compile(r"(?P<name>.+)\[(?P<sides>\d+:\d+/\d+(?:,\d+:\d+/\d+)*)\]")


@dataclass(frozen=True)
class Box:
    """Elements ``at`` to ``at`` + ``size``, by dimension, of a tensor [*shape].

    >>> Box((2, 0), (2, 3), (5, 3)).called("w")
    'w[2:4/5,0:3/3]'
    """

    at: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        sides = list(zip(self.at, self.size, self.shape, strict=True))
        inside = all(min(at, n) >= 0 and at + n <= whole for at, n, whole in sides)
        require(inside, InputError, f"{self.called('a box')} is not inside its tensor; give one that is")

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What it is of the whole tensor."""
        return tuple(slice(at, at + n) for at, n in zip(self.at, self.size, strict=True))

    def called(self, name: str) -> str:
        """Return the name of this box of the tensor ``name``."""
        sides = zip(self.at, self.size, self.shape, strict=True)
        return f"{name}[{','.join(f'{at}:{at + n}/{whole}' for at, n, whole in sides)}]"

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of all elements."""
        return cls((0,) * len(shape), shape, shape)


def parse(name: str) -> tuple[str, Box | None]:
    """Return the tensor's name and the box that ``called`` made a name of; None where it is no such name.

    >>> parse("w[2:4/5]"), parse("w")
    (('w', Box(at=(2,), size=(2,), shape=(5,))), ('w', None))
    """
    found = _NAMED.fullmatch(name)
    if found is None:
        return name, None
    numbers = [tuple(map(int, re.split("[:/]", side))) for side in found["sides"].split(",")]
    at = tuple(n[0] for n in numbers)
    return found["name"], Box(at, tuple(n[1] - n[0] for n in numbers), tuple(n[2] for n in numbers))


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how far apart neighbours are by dimension, in a tensor that lies in memory as it reads.

    >>> strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
