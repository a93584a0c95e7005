"""A message in pieces that are acknowledged: one that was cut off goes on from where its receiver stands.

A connection keeps their order; what breaks with it is sent again. Layout of a piece, little-endian::

word u8, number of the message u64, offset u64, total u64, bytes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from thinwire.heads import U64, Head, Rest
from thinwire.types import PayloadError, require
from thinwire.uses.federated.remote.words import Word, pack

WINDOW = 1 << 22  # bytes that may be under way unacknowledged
EVERY = 0.25  # seconds after which an acknowledgement is due,
SHARE = WINDOW // 4  # or bytes: a line that carries the window within that time would stand still else


class Piece(Head, kind=Word.PIECE):
    """Some bytes of a message."""

    number: U64
    offset: U64
    total: U64
    data: Rest

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Self:
        """Read what ``Sending`` made; ``PayloadError`` for anything else."""
        piece = super().unpack(data)
        fits = 0 < len(piece.data) <= piece.total - piece.offset
        wrong = f"a piece of {len(piece.data)} bytes at {piece.offset} of {piece.total}"
        require(fits, PayloadError, wrong)
        return piece


class Sending:
    """Send ``data`` as the message ``number``, ``size`` bytes of it at a time.

    >>> there, pieces = Receiving(7, total=5), []
    >>> sending = Sending(7, b"hello", size=3)
    >>> sending.send(lambda piece: pieces.append(piece) is None)
    >>> [there.take(Piece.unpack(piece)) for piece in pieces], there.data
    ([False, True], b'hello')
    """

    def __init__(self, number: int, data: bytes, size: int) -> None:
        self.number, self._data, self._size = number, memoryview(data), size
        self._next = self._there = 0

    @property
    def done(self) -> bool:
        """Whether the receiver has all of it."""
        return self._there == len(self._data)

    def send(self, put: Callable[[bytes], bool]) -> None:
        """Give ``put`` what is due, until it takes no more."""
        total = len(self._data)
        while self._next < total and self._next - self._there < WINDOW:
            part = self._data[self._next : self._next + self._size]
            if not put(Piece.FORM.pack(Word.PIECE, self.number, self._next, total) + part):
                return
            self._next += len(part)

    def heard(self, have: int) -> None:
        """Note that the receiver has so many bytes."""
        self._there = max(self._there, min(have, self._next))

    def restart(self, have: int) -> None:
        """Go on from what the receiver has, over a new connection."""
        self._next = self._there = max(0, min(have, len(self._data)))


class Receiving:
    """Put the message ``number``, of ``total`` bytes, together; memory is taken as they come."""

    def __init__(self, number: int, total: int) -> None:
        self.number, self.total = number, total
        self._data = bytearray()
        self._told = -EVERY, 0  # when the last acknowledgement left, and for how many bytes
        self._first: tuple[float, int] | None = None  # when the first piece had come, and bytes by then
        self.rate: float | None = None  # bytes/s between the first piece and the last, of one connection

    @property
    def have(self) -> int:
        """Bytes that are here."""
        return len(self._data)

    @property
    def data(self) -> bytes:
        """The message, once it is whole."""
        return bytes(self._data)

    def take(self, piece: Piece, now: float = 0.0) -> bool:
        """Add a piece that came at ``now`` [s], and return whether the message is whole."""
        fits = piece.total == self.total and piece.offset + len(piece.data) <= self.total
        if fits and piece.offset <= self.have:
            self._data += piece.data[self.have - piece.offset :]
        if self._first is None:
            self._first = now, self.have
        since, before = self._first
        self.rate = (self.have - before) / (now - since) if now > since else None
        return self.have == self.total

    def broke(self) -> None:
        """Forget the times of a connection that broke."""
        self._first = self.rate = None

    def acknowledge(self, now: float, put: Callable[[bytes], bool]) -> None:
        """Say by ``put`` how much is here, where that is due at ``now`` [s]; again, had it found no room."""
        then, have = self._told
        due = self.have == self.total or now - then >= EVERY or self.have - have >= SHARE
        if due and put(pack(Word.HAVE, number=self.number, have=self.have)):
            self._told = now, self.have
