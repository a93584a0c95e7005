"""Links that change: piecewise-constant rates, delays and losses that repeat, read from a text file."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

from thinwire.links.shape import MAX_DELAY, RATES
from thinwire.types import InputError, require

SHIPPED = Path(__file__).parent / "traces"
COLUMNS = ("seconds", "up_mbit", "down_mbit", "delay_ms", "loss_percent")
MAX_BYTES = 1 << 22  # of a trace file: over a day of rows a second apart


class TraceRow(NamedTuple):
    """What a link is from ``time`` on, until the next row."""

    time: float  # seconds from the start
    up: float  # bytes/s
    down: float  # bytes/s
    delay: float = 0.0  # seconds, one way
    loss: float = 0.0  # probability that a segment is lost


class Rate(Protocol):
    """How fast a line sends, now and later."""

    @property
    def mean(self) -> float: ...  # bytes/s

    def between(self, begin: float, end: float) -> float: ...  # bytes it can send in that time

    def finish(self, begin: float, nbytes: float) -> float: ...  # when they have left, sent from begin on


@dataclass(frozen=True)
class ConstantRate:
    """The same rate at all times; infinite is a line that takes no time.

    >>> ConstantRate(1000.0).finish(begin=2.0, nbytes=500)
    2.5
    """

    mean: float = math.inf  # bytes/s

    def between(self, begin: float, end: float) -> float:
        """Return the bytes that fit between two times."""
        return (end - begin) * self.mean

    def finish(self, begin: float, nbytes: float) -> float:
        """Return when bytes sent from ``begin`` on have left."""
        return begin + nbytes / self.mean


@dataclass(frozen=True)
class VaryingRate:
    """A rate that changes at given times and repeats: ``rates[i]`` from ``times[i]`` on, modulo ``period``.

    Times begin at 0 and increase; rates are above zero. Bytes and times convert through the cumulative
    bytes at each change, so both questions cost one bisection.

    >>> line = VaryingRate(times=(0.0, 1.0), rates=(1000.0, 100.0), period=2.0)
    >>> line.finish(begin=0.5, nbytes=550), line.finish(begin=0.0, nbytes=11 * 1100)
    (1.5, 22.0)
    """

    times: tuple[float, ...]  # seconds
    rates: tuple[float, ...]  # bytes/s
    period: float  # seconds

    @cached_property
    def _ends(self) -> tuple[float, ...]:
        return (*self.times[1:], self.period)

    @cached_property
    def _sums(self) -> tuple[float, ...]:
        spans = zip(self.times, self._ends, self.rates, strict=True)
        return (0.0, *accumulate((end - begin) * rate for begin, end, rate in spans))

    @property
    def mean(self) -> float:
        return self._sums[-1] / self.period

    def _sent(self, time: float) -> float:
        cycles, rest = divmod(time, self.period)
        i = bisect_right(self.times, rest) - 1
        return cycles * self._sums[-1] + self._sums[i] + (rest - self.times[i]) * self.rates[i]

    def between(self, begin: float, end: float) -> float:
        """Return the bytes that fit between two times."""
        return self._sent(end) - self._sent(begin)

    def finish(self, begin: float, nbytes: float) -> float:
        """Return when bytes sent from ``begin`` on have left."""
        rest = begin % self.period
        i = bisect_right(self.times, rest) - 1
        left = (self._ends[i] - rest) * self.rates[i]
        if nbytes <= left:  # most packets leave before the rate changes
            return begin + nbytes / self.rates[i]
        cycles, rest_bytes = divmod(self._sums[i + 1] + nbytes - left, self._sums[-1])
        i = bisect_right(self._sums, rest_bytes) - 1
        within = self.times[i] + (rest_bytes - self._sums[i]) / self.rates[i]
        return begin - rest + cycles * self.period + within


@dataclass(frozen=True)
class Trace:
    """A link that changes with time and begins anew after ``period`` seconds.

    Errors: ``InputError`` for no rows, times that do not begin at 0 or do not increase, rates that are not
    above zero, delays below zero or above 10 s, losses outside [0, 1).

    >>> Trace((TraceRow(0, 1e6, 1e6, 0.01), TraceRow(20, 1e5, 1e5, 0.03)), period=30.0).at(75.0).delay
    0.01
    """

    rows: tuple[TraceRow, ...]
    period: float  # seconds
    name: str = "trace"

    def __post_init__(self) -> None:
        require(bool(self.rows), InputError, f"{self.name} has no rows; give one line a change of the link")
        before = None
        for i, row in enumerate(self.rows):
            _check(row, before, f"{self.name}, row {i}")
            before = row.time
        require(
            self.rows[-1].time < self.period < math.inf,
            InputError,
            f"{self.name} has a period of {self.period} s, which is not after its last row",
        )

    @cached_property
    def times(self) -> tuple[float, ...]:
        return tuple(row.time for row in self.rows)

    @cached_property
    def up(self) -> VaryingRate:
        return VaryingRate(self.times, tuple(row.up for row in self.rows), self.period)

    @cached_property
    def down(self) -> VaryingRate:
        return VaryingRate(self.times, tuple(row.down for row in self.rows), self.period)

    @cached_property
    def mean_delay(self) -> float:
        spans = zip(self.rows, (*self.times[1:], self.period), strict=True)
        return sum(row.delay * (end - row.time) for row, end in spans) / self.period

    def at(self, time: float) -> TraceRow:
        """Return the row in force at ``time`` seconds after the start."""
        return self.rows[bisect_right(self.times, time % self.period) - 1]

    @classmethod
    def load(cls, name: str) -> Trace:
        """Read a shipped trace by its name, or a file.

        Errors: ``InputError`` for a file that cannot be read, and whatever is wrong in it, by its line.
        """
        shipped = SHIPPED / f"{name}.csv"
        path = shipped if name in shipped_names() else Path(name)
        try:
            require(path.is_file(), InputError, f"no trace file {name!r}; give a file, or {_names()}")
            with path.open("rb") as f:
                data = f.read(MAX_BYTES + 1)
        except OSError as e:
            raise InputError(f"cannot read trace {name!r} ({e.strerror}); give a file, or {_names()}") from e
        limit = f"trace {name!r} is above {MAX_BYTES >> 20} MiB; give fewer rows"
        require(len(data) <= MAX_BYTES, InputError, limit)
        return parse_trace(data, name)


def shipped_names() -> list[str]:
    """Return the names of the traces that come with the package."""
    return sorted(p.stem for p in SHIPPED.glob("*.csv"))


def _names() -> str:
    return f"one of the shipped traces {', '.join(shipped_names())}"


def parse_trace(data: bytes, name: str) -> Trace:
    """Read a trace: comment lines that begin with #, a header, then one line a change.

    The header is ``seconds,up_mbit,down_mbit,delay_ms,loss_percent``; the last one or two columns may be
    left out (no delay, no loss). The first row is at 0 seconds. The last row lasts as long as the one before
    it, then the trace begins anew; a single row holds for ever. Errors: ``InputError`` that names file, line
    and value.

    >>> parse_trace(b"# a dip\\nseconds,up_mbit,down_mbit\\n0,8,80\\n20,4,40\\n", "dip").period
    40.0
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputError(f"trace {name!r} is no text: byte {e.start} is no UTF-8; give a CSV file") from e
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1)]
    lines = [(n, line) for n, line in lines if line and not line.startswith("#")]
    require(len(lines) > 1, InputError, f"trace {name!r} has no rows; give a header and one line a change")
    width = _header(lines[0], name)
    rows: list[TraceRow] = []
    for n, line in lines[1:]:
        rows.append(_row(line, width, f"trace {name!r}, line {n}"))
        _check(rows[-1], rows[-2].time if rows[1:] else None, f"trace {name!r}, line {n}")
    end = 2 * rows[-1].time - rows[-2].time if rows[1:] else 1.0
    return Trace(tuple(rows), end, name)


def _header(line: tuple[int, str], name: str) -> int:
    names = tuple(part.strip() for part in line[1].split(","))
    require(
        len(names) >= 3 and names == COLUMNS[: len(names)],
        InputError,
        f"trace {name!r}, line {line[0]}: the header is {line[1][:60]!r}; write {','.join(COLUMNS)}",
    )
    return len(names)


def _row(line: str, width: int, where: str) -> TraceRow:
    parts = [part.strip() for part in line.split(",")]
    require(
        len(parts) == width,
        InputError,
        f"{where}: {line[:60]!r} has {len(parts)} values; give {width}, as the header does",
    )
    values = [0.0] * len(COLUMNS)
    for i, part in enumerate(parts):
        try:
            values[i] = float(part)
        except ValueError as e:
            raise InputError(f"{where}: {COLUMNS[i]} is {part[:30]!r}; give a number") from e
    time, up, down, delay, loss = values
    return TraceRow(time, up * RATES["mbit"], down * RATES["mbit"], delay / 1e3, loss / 100)


def _check(row: TraceRow, before: float | None, where: str) -> None:
    for name, rate in (("up", row.up), ("down", row.down)):
        require(
            0 < rate < math.inf,
            InputError,
            f"{where}: the {name} rate is {rate / RATES['mbit']:g} Mbit/s; give a rate above zero",
        )
    shift = f"{where}: the delay is {row.delay * 1e3:g} ms; give 0 to {MAX_DELAY * 1e3:g}"
    require(0 <= row.delay <= MAX_DELAY, InputError, shift)
    require(0 <= row.loss < 1, InputError, f"{where}: the loss is {row.loss * 100:g} %; give 0 to below 100")
    if before is None:
        require(row.time == 0, InputError, f"{where}: the first time is {row.time:g} s; begin at 0")
    else:
        require(
            before < row.time < math.inf,
            InputError,
            f"{where}: the time {row.time:g} s is not after {before:g} s; times must increase",
        )
