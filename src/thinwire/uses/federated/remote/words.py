"""What server and clients say to each other besides models: a byte for the word, and JSON."""

from __future__ import annotations

import enum
import json
import math
from typing import Any

from thinwire.types import MAX_KEY, PayloadError, require

PROTOCOL = 2
MOST = 4000  # bytes of a piece, or of a word: what a hub reads at a time, less its head
MOST_TEXT = 400  # characters of a sentence that somebody else wrote
GREATEST = 1e18  # of a number of seconds or bytes/s


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
