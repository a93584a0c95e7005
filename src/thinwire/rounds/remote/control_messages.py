"""What server and clients say to each other besides models: a byte for the word, then JSON or a piece.

A message comes in pieces that are acknowledged: one that was cut off goes on from where its receiver stands.
A connection keeps their order; what breaks with it is sent again. Layout of a piece, little-endian::

word u8, number of the message u64, offset u64, total u64, bytes
"""

from __future__ import annotations

import enum
import json
import math
import zlib
from collections.abc import Callable
from typing import Any, Self

from thinwire.heads import U64, Head, Rest
from thinwire.types import MAX_KEY, WRONG_VALUES, PayloadError, require

PROTOCOL = 4
STATE = 1 << 61  # plus a version's number: a message that brings it to a client before it takes part
MOST = 4000  # bytes of a piece, or of a word: what a hub reads at a time, less its head
MOST_TEXT = 400  # characters of a sentence that somebody else wrote
MOST_NAME = 60  # characters of a name
GREATEST = 1e18  # of a number of seconds or bytes/s
MOST_WORDS = 1 << 28  # bytes of what a server knows of its clients and samples
TICK = 0.1  # seconds that either end waits for something to happen, before it looks after the rest
WINDOW = 1 << 22  # bytes that may be under way unacknowledged
EVERY = 0.25  # seconds after which an acknowledgement is due,
SHARE = WINDOW // 4  # or bytes: a line that carries the window within that time would stand still else


class Word(enum.IntEnum):
    """What a message is about."""

    ASK = 1  # a client: what is to be done here?
    TERMS = 2  # the server: this, and who you are
    PROBE = 3  # both: bytes that are timed
    HELLO = 4  # a client: I am here, with so much data, and this is where I stand
    WELCOME = 5  # the server: go on with your update from here, or wait
    PIECE = 6  # both: bytes of a version or an update
    HAVE = 7  # both: so many bytes of it are here
    RECEIPT = 8  # the server: your update was taken, or why not
    SPEED = 9  # a client: a local step takes this long now
    FAILED = 10  # a client: my training failed
    REFUSED = 11  # the server: you cannot take part, and why
    DONE = 12  # the server: it is over; the client: I heard it
    SHADOW = 14  # a client: send me your state whenever it is another than this; it comes in pieces, too
    PAIR = 15  # a client: I wait for another half; the server: here is one, and this is where you meet
    KIT = 13  # a client: send me, from here, what the model is made of; it comes in pieces of the message 0


def pack(word: Word, **values: Any) -> bytes:
    """Return a word and its values as bytes."""
    return bytes([word]) + json.dumps(values, separators=(",", ":")).encode()


def word_of(data: bytes) -> Word:
    """Return which word a message is. Errors: ``PayloadError``."""
    known = len(data) > 0 and data[0] in Word.__members__.values()
    require(known, PayloadError, f"a message that begins with {data[:1]!r}; update the older end")
    return Word(data[0])


def values_of(data: bytes) -> dict[str, Any]:
    """Return the values of a word. Errors: ``PayloadError``."""
    try:
        found = json.loads(bytes(data[1:]))
    except (ValueError, RecursionError) as e:
        raise PayloadError("a message whose values are no JSON") from e
    require(isinstance(found, dict), PayloadError, "a message whose values have no names")
    return dict(found)


def whole(values: dict[str, Any], name: str) -> int:
    """Return a whole number from 0 up. Errors: ``PayloadError``."""
    x = values.get(name)
    good = isinstance(x, int) and not isinstance(x, bool) and 0 <= x < MAX_KEY // 2
    require(good, PayloadError, f"{name} is {ascii(x)[:40]} in a message, not a whole number")
    return int(x or 0)


def positive(values: dict[str, Any], name: str) -> float:
    """Return a number above 0; infinite for null. Errors: ``PayloadError``."""
    x = values.get(name)
    if x is None:
        return math.inf
    good = isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < GREATEST
    require(good, PayloadError, f"{name} is {ascii(x)[:40]} in a message, not a number above 0")
    return float(x)


def text(values: dict[str, Any], name: str) -> str:
    """Return a sentence, cut where it is too long, without what would move a terminal's cursor."""
    x = str(values.get(name, ""))[:MOST_TEXT]
    return "".join(c if c.isprintable() else " " for c in x)


def pack_words(text: str) -> bytes:
    """Return what a server knows as the work of a version."""
    return zlib.compress(text.encode(), 6)


def unpack_words(data: bytes | memoryview) -> dict[str, Any]:
    """Read what ``pack_words`` wrote. Errors: ``PayloadError``."""
    opened = zlib.decompressobj()
    try:
        text = opened.decompress(bytes(data), MOST_WORDS)
        require(opened.eof, PayloadError, "what the server knows is cut, or too long")
        words = json.loads(text)
    except (*WRONG_VALUES, zlib.error) as e:
        raise PayloadError("what the server knows cannot be read") from e
    require(isinstance(words, dict), PayloadError, "what the server knows has no names")
    return dict(words)


class MessagePiece(Head, kind=Word.PIECE):
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
    >>> [there.take(MessagePiece.unpack(piece)) for piece in pieces], there.data
    ([False, True], b'hello')
    """

    def __init__(self, number: int, data: bytes, size: int) -> None:
        self.number, self._data, self._size = number, memoryview(data), size
        self._next = self._there = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return len(self._data)

    @property
    def sent(self) -> bool:
        """Whether all of it has left."""
        return self._next == len(self._data)

    @property
    def done(self) -> bool:
        """Whether the receiver has all of it."""
        return self._there == len(self._data)

    def send(self, put: Callable[[bytes], bool]) -> None:
        """Give ``put`` what is due, until it takes no more."""
        total = len(self._data)
        while self._next < total and self._next - self._there < WINDOW:
            part = self._data[self._next : self._next + self._size]
            if not put(MessagePiece.FORM.pack(Word.PIECE, self.number, self._next, total) + part):
                return
            self._next += len(part)

    def heard(self, have: int) -> int:
        """Note that the receiver has so many bytes; return how many of them are news."""
        before, self._there = self._there, max(self._there, min(have, self._next))
        return self._there - before

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

    def take(self, piece: MessagePiece, now: float = 0.0) -> bool:
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
