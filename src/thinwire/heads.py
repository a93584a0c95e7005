"""Heads of messages: fields of fixed size, each declared with how it is sent; little-endian, without gaps.

>>> class Ack(Head, kind=2):
...     session: U32
...     received: U64
>>> Ack(1, 4096).pack().hex(), Ack.unpack(Ack(1, 4096).pack()).received
('02010000000010000000000000', 4096)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Self, dataclass_transform, get_type_hints

from thinwire.types import PayloadError

# What a field is annotated with: its type, and its code in ``struct``.
U8 = Annotated[int, "B"]
U32 = Annotated[int, "I"]
U64 = Annotated[int, "Q"]
F64 = Annotated[float, "d"]
Rest = Annotated[memoryview | bytes, ""]  # the last field of a message: all bytes that are left


@dataclass_transform(frozen_default=True)
class Head:
    """A message, or the head of one, behind a byte for its ``kind``; every subclass is a frozen dataclass."""

    KIND: ClassVar[Any]
    FORM: ClassVar[struct.Struct]  # the kind's byte, where there is one, and all fields but a rest
    _FIXED: ClassVar[Any]  # gets the values of these
    _REST: ClassVar[str | None]  # the name of the rest

    def __init_subclass__(cls, kind: int | None = None) -> None:
        dataclass(frozen=True)(cls)
        hints = get_type_hints(cls, include_extras=True)
        codes = {f.name: hints[f.name].__metadata__[0] for f in fields(cls)}  # type: ignore[arg-type]
        cls._REST = next((name for name, code in codes.items() if not code), None)
        cls.KIND, code = (b"", "0s") if kind is None else (int(kind), "B")
        cls.FORM = struct.Struct("<" + code + "".join(codes.values()))
        cls._FIXED = attrgetter("KIND", *(name for name, code in codes.items() if code))

    def pack(self) -> bytes:
        """Return the message as bytes."""
        return b"".join(self.parts())

    def parts(self) -> tuple[bytes | memoryview, ...]:
        """Return the same in parts, of which the rest is not copied."""
        head = self.FORM.pack(*self._FIXED(self))
        return (head,) if self._REST is None else (head, getattr(self, self._REST))

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Self:
        """Return the message in ``data``, whatever its kind's byte; ``PayloadError`` for another length."""
        n, size = len(data), cls.FORM.size
        if n < size or (n > size and cls._REST is None):
            raise PayloadError(f"{n} bytes of {cls.__name__.upper()}, expected {size}")
        _, *values = cls.FORM.unpack_from(data)
        if cls._REST is not None:
            values.append(memoryview(data)[size:])
        return cls(*values)
