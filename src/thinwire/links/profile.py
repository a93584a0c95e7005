"""What a rank's connection is like: both directions' rates, delay, jitter, loss and queue, read from text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.links.shape import PARTS, LinkShape, digits, rate_text, read_parts, time_text, wrong_loss
from thinwire.links.trace import ConstantRate, Rate, Trace
from thinwire.types import InputError, require

EXAMPLE = (
    "write it like 100mbit,50ms,jitter=2ms,loss=0.1%,queue=250kB or up=10mbit,down=50mbit,20ms or trace:lte"
)
KINDS = PARTS | {"up": "rate", "down": "rate", "queue": "size"}
MIN_QUEUE = 70_000  # bytes: one offloaded packet of 64 KiB and its headers must fit
_RANKED = re.compile(r"\s*(\d{1,9})\s*=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Profile:
    """One rank's connection to the network; the default leaves it as it is.

    None means what the trace says, where there is one; without one, it means a rate without limit, no delay
    and no loss. Between two ranks, delay, jitter and loss are the mean of what the two say, so that
    ``100mbit,50ms`` for all ranks is 50 ms one way between any two.

    >>> Profile.parse("up=10mbit,down=50mbit,20ms")
    Profile(up=1250000.0, down=6250000.0, delay=0.02, jitter=0.0, loss=0.0, queue=None, trace=None)
    >>> str(Profile(up=125e6, down=125e6, queue=250_000)), str(Profile())
    ('1gbit,queue=250kB', 'none')
    """

    up: float | None = None  # bytes/s
    down: float | None = None  # bytes/s
    delay: float | None = None  # seconds, one way
    jitter: float = 0.0  # seconds; each packet is late by up to this much more, evenly drawn, order kept
    loss: float | None = None  # probability that a segment is lost
    queue: int | None = None  # bytes that may wait before each direction's line; None: see `limit`
    trace: Trace | None = None

    def __post_init__(self) -> None:
        if self.trace is None:
            object.__setattr__(self, "delay", self.delay or 0.0)
            object.__setattr__(self, "loss", self.loss or 0.0)
        for name, rate in (("up", self.up), ("down", self.down), ("queue", self.queue)):
            good = rate is None or 0 < rate < math.inf
            require(good, InputError, f"a link's {name} of {rate} is not above zero; {EXAMPLE}")
        for name, time in (("delay", self.delay or 0.0), ("jitter", self.jitter)):
            good = 0 <= time < math.inf
            require(good, InputError, f"a link {name} of {time} s is not zero or more; {EXAMPLE}")
        lost = self.loss or 0.0
        require(0 <= lost < 1, InputError, f"{wrong_loss(lost)}; {EXAMPLE}")

    @classmethod
    def parse(cls, text: str) -> Profile:
        """Read ``none``, or what a connection is like, in parts separated by commas.

        In any order: one rate, or ``up=`` and ``down=``; the one-way delay; ``jitter=``; ``loss=``;
        ``queue=`` (B, kB, MB). ``trace:FILE``, or ``trace:NAME`` of a shipped trace, may stand first; what
        follows overrides it. Errors: ``InputError`` that names the part or the trace's line that is wrong.
        """
        head, comma, rest = text.partition(",")
        head = head.strip()
        if head.lower() == "none" and not comma:
            return cls()
        trace = None
        if head.startswith("trace:"):
            trace = Trace.load(head.removeprefix("trace:"))
            if not comma:
                return cls(trace=trace)
        found = read_parts(text if trace is None else rest, KINDS, EXAMPLE)
        rate = found.pop("rate", None)
        both = rate is not None and ("up" in found or "down" in found)
        require(not both, InputError, f"link {text!r} has a rate beside up= or down=; {EXAMPLE}")
        if rate is not None:
            found |= {"up": rate, "down": rate}
        return cls(
            up=found.get("up"),
            down=found.get("down"),
            delay=found.get("delay"),
            jitter=found.get("jitter", 0.0),
            loss=found.get("loss"),
            queue=_whole(found["queue"], text) if "queue" in found else None,
            trace=trace,
        )

    def __str__(self) -> str:
        parts = [] if self.trace is None else [f"trace:{self.trace.name}"]
        if self.up is not None and self.up == self.down:
            parts += [rate_text(self.up)]
        else:
            sides = (("up", self.up), ("down", self.down))
            parts += [f"{name}={rate_text(rate)}" for name, rate in sides if rate is not None]
        if self.delay is not None and (self.delay or self.trace):
            parts += [time_text(self.delay)]
        parts += [f"jitter={time_text(self.jitter)}"] if self.jitter else []
        if self.loss is not None and (self.loss or self.trace):
            parts += [f"loss={digits(self.loss * 100)}%"]
        parts += [f"queue={_size_text(self.queue)}"] if self.queue is not None else []
        return ",".join(parts) or "none"

    @property
    def uplink(self) -> Rate:
        """How fast the rank's own line sends."""
        if self.up is None and self.trace is not None:
            return self.trace.up
        return ConstantRate(self.up or math.inf)

    @property
    def downlink(self) -> Rate:
        """How fast the line to the rank sends."""
        if self.down is None and self.trace is not None:
            return self.trace.down
        return ConstantRate(self.down or math.inf)

    def limit(self, line: Rate) -> float:
        """Return the bytes that may wait before ``line``.

        By default what the line sends in a round trip (twice delay and jitter), at least ``MIN_QUEUE``. For a
        trace, rate and delay are its means: its buffer is a fixed number of bytes, as a modem's is, and so
        takes longer to drain when the rate falls.
        """
        if self.queue is not None:
            return self.queue
        delay = self.delay if self.delay is not None else self.trace.mean_delay if self.trace else 0.0
        trip = 2 * (delay + self.jitter)
        return max(MIN_QUEUE, trip * line.mean) if trip else MIN_QUEUE

    def delay_at(self, time: float) -> float:
        """Return the one-way delay [s] ``time`` seconds after the start."""
        if self.delay is None and self.trace is not None:
            return self.trace.at(time).delay
        return self.delay or 0.0

    def loss_at(self, time: float) -> float:
        """Return the probability that a segment is lost, ``time`` seconds after the start."""
        if self.loss is None and self.trace is not None:
            return self.trace.at(time).loss
        return self.loss or 0.0


def one_way(a: Profile, b: Profile, time: float = 0.0) -> float:
    """Return the delay [s] between two ranks: the mean of their delays.

    >>> one_way(Profile(delay=0.01), Profile(delay=0.03))
    0.02
    """
    return (a.delay_at(time) + b.delay_at(time)) / 2


def plain_shape(text: str, instead: str) -> LinkShape:
    """Return the shape that ``text`` gives a link outside an emulated network.

    Errors: ``InputError``; for a connection that only an emulated network has, it ends with ``instead``.
    """
    try:
        return LinkShape.parse(text)
    except InputError:
        try:
            Profile.parse(text)
        except InputError:
            pass
        else:
            raise InputError(f"link {text!r} is one of an emulated network; {instead}") from None
        raise


def profiles(texts: Sequence[str], ranks: int) -> list[Profile]:
    """Read one profile for all ranks, or ``RANK=...`` for some of them and at most one for the others.

    Errors: ``InputError`` for a second text for a rank, a rank that is not there, one without a text.

    >>> [str(p) for p in profiles(["100mbit,5ms", "0=10mbit"], 2)]
    ['10mbit', '100mbit,5ms']
    """
    found: dict[int | None, Profile] = {}
    for text in texts:
        m = _RANKED.fullmatch(text)
        rank = int(m[1]) if m else None
        who = "all ranks" if rank is None else f"rank {rank}"
        require(rank not in found, InputError, f"link {text!r} is a second one for {who}; give one")
        there = rank is None or rank < ranks
        require(there, InputError, f"link {text!r} is for rank {rank}, but ranks are 0 to {ranks - 1}")
        found[rank] = Profile.parse(m[2] if m else text)
    bare = [r for r in range(ranks) if r not in found and None not in found]
    require(
        not bare or not texts,
        InputError,
        f"rank {bare[0] if bare else 0} has no link; give one without RANK= for the ranks not named",
    )
    others = found.get(None, Profile())
    return [found.get(rank, others) for rank in range(ranks)]


def _whole(size: float, text: str) -> int:
    fine = size == int(size) if math.isfinite(size) else False
    require(fine, InputError, f"the queue in link {text!r} is no whole number of bytes; {EXAMPLE}")
    return int(size)


def _size_text(size: int) -> str:
    unit, name = next((u for u in ((10**6, "MB"), (10**3, "kB")) if size >= u[0]), (1, "B"))
    return digits(size / unit) + name
