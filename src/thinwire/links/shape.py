"""The shape of a slow link, a value that reads from text, and the timetable it gives to messages."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from thinwire.types import InputError, require

MTU = 1500  # bytes of an IP packet
SEGMENT = 1448  # bytes of payload in one TCP segment: the MTU less IPv4, TCP and time-stamp headers
RATES = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}  # bytes/s
TIMES = {"us": 1e6, "ms": 1e3, "s": 1.0}  # in a second
SIZES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9}  # bytes
MAX_DELAY = 10.0  # seconds one way, and of jitter: beyond any link, so a slip of the unit
PARTS = {"rate": "rate", "delay": "time", "jitter": "time", "loss": "share"}  # what may be said of a link
EXAMPLE = "write it like 10mbit,30ms,jitter=2ms,loss=0.1%"
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([a-z%]*)")


@dataclass(frozen=True)
class LinkShape:
    """Rate per direction, one-way delay, jitter and loss of a link; the default changes nothing.

    >>> LinkShape.parse("10mbit,30ms,jitter=2ms")
    LinkShape(rate=1250000.0, delay=0.03, jitter=0.002, loss=0.0)
    >>> str(LinkShape(rate=125e6, loss=0.001)), str(LinkShape())
    ('1gbit,loss=0.1%', 'none')
    """

    rate: float | None = None  # bytes/s
    delay: float = 0.0  # seconds, one way
    jitter: float = 0.0  # seconds; each message is late by up to this much more, evenly drawn, order kept
    loss: float = 0.0  # probability that a segment is lost

    def __post_init__(self) -> None:
        require(
            self.rate is None or 0 < self.rate < math.inf,
            InputError,
            f"a link rate of {self.rate} bytes/s is not above zero; {EXAMPLE}",
        )
        for name in ("delay", "jitter"):
            value = getattr(self, name)
            require(
                0 <= value < math.inf,
                InputError,
                f"a link {name} of {value} s is not zero or more; {EXAMPLE}",
            )
        require(0 <= self.loss < 1, InputError, f"{wrong_loss(self.loss)}; {EXAMPLE}")

    @property
    def is_none(self) -> bool:
        """Whether it changes nothing."""
        return self == LinkShape()

    @classmethod
    def parse(cls, text: str) -> LinkShape:
        """Read ``none``, or rate (kbit, mbit, gbit), one-way delay (us, ms, s), jitter=, loss= in any order.

        Errors: ``InputError`` that names the part that is wrong.
        """
        if text.strip().lower() == "none":
            return cls()
        return cls(**read_parts(text, PARTS))

    def __str__(self) -> str:
        parts = [] if self.rate is None else [rate_text(self.rate)]
        parts += [] if not self.delay else [time_text(self.delay)]
        parts += [] if not self.jitter else [f"jitter={time_text(self.jitter)}"]
        parts += [] if not self.loss else [f"loss={digits(self.loss * 100)}%"]
        return ",".join(parts) or "none"


def read_parts(text: str, kinds: dict[str, str], example: str = EXAMPLE) -> dict[str, float]:
    """Read comma-separated ``key=value`` parts; a bare rate is ``rate=``, a bare time ``delay=``.

    ``kinds`` names the keys and what each takes: a rate, time, share or size. Returns bytes/s, seconds,
    a fraction or bytes by key. Errors: ``InputError`` that names the part, and ends with ``example``; a time
    above ``MAX_DELAY`` is one.

    >>> read_parts("2kbit,up=1mbit", {"rate": "rate", "up": "rate"})
    {'rate': 250.0, 'up': 125000.0}
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        key, value = _part(part.strip(), text, kinds, example)
        require(
            key not in found,
            InputError,
            f"{part.strip()!r} in link {text!r} is a second {key}; {example}",
        )
        found[key] = value
    return found


def _part(part: str, text: str, kinds: dict[str, str], example: str) -> tuple[str, float]:
    key, equals, rest = part.lower().partition("=")
    m = _NUMBER.fullmatch(rest.strip() if equals else key)
    if m is not None:
        number, unit = Decimal(m[1]), m[2]
        key = key.strip() if equals else "rate" if unit in RATES else "delay" if unit in TIMES else ""
        value = _value(kinds.get(key, ""), number, unit)
        if value is not None:
            zero = kinds[key] in ("rate", "size") and not value
            require(not zero, InputError, f"the {key} {part!r} in link {text!r} is zero; {example}")
            long = f"the {key} {part!r} in link {text!r} is above {MAX_DELAY:g} s; {example}"
            require(kinds[key] != "time" or value <= MAX_DELAY, InputError, long)
            return key, value
    raise InputError(f"cannot read {part!r} in link {text!r}; {example}")


def _value(kind: str, number: Decimal, unit: str) -> float | None:
    if kind == "rate" and unit in RATES:
        return float(number * Decimal(RATES[unit]))
    if kind == "time" and unit in TIMES:
        return float(number / Decimal(TIMES[unit]))
    if kind == "size" and unit in SIZES:
        return float(number * Decimal(SIZES[unit]))
    if kind == "share" and unit in ("%", ""):
        return float(number / 100 if unit else number)
    return None


def wrong_loss(share: float) -> str:
    """Say what is wrong with a loss that is no share below 1."""
    return f"a link loss of {100 * share:.4g}% is not from 0% to below 100%"


def digits(x: float) -> str:
    """Write a number in plain decimals, without an exponent or trailing zeros."""
    return f"{x:.12f}".rstrip("0").rstrip(".")


def rate_text(rate: float) -> str:
    """Write a rate [bytes/s] as ``LinkShape.parse`` reads it."""
    unit = next((u for u in ("gbit", "mbit") if rate >= RATES[u]), "kbit")
    return digits(rate / RATES[unit]) + unit


def time_text(seconds: float) -> str:
    """Write a time [s] as ``LinkShape.parse`` reads it."""
    unit = next((u for u in ("s", "ms") if seconds * TIMES[u] >= 1), "us")
    return digits(seconds * TIMES[unit]) + unit
