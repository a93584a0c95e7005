"""Load a prefix's cache, or compute it again: whichever is ready sooner, from what was measured."""

from __future__ import annotations

import math
from typing import NamedTuple

from thinwire.types import InputError, require


class Recomputing(NamedTuple):
    """Seconds that a model takes for a prefix of n tokens: ``each`` * n + ``pair`` * n * n.

    >>> times = Recomputing.measured([(256, 1.0), (1024, 4.6)])
    >>> round(times.seconds(2048), 1)
    10.8
    """

    each: float  # seconds a token
    pair: float = 0.0  # seconds for a token to look at one before it

    @classmethod
    def measured(cls, runs: list[tuple[int, float]]) -> Recomputing:
        """Return what fits runs of (tokens, seconds): through one or two of them, near more of them.

        Errors: ``InputError`` for none, or for times that are no times.
        """
        require(bool(runs), InputError, "no runs to tell a model's speed by; measure one or more")
        for n, s in runs:
            good = n > 0 and s > 0 and math.isfinite(s)
            require(good, InputError, f"{s} seconds for {n} tokens, expected more than none of both")
        rates = [(float(n), s / n) for n, s in runs]  # a line: each + pair * n
        mean_n, mean_rate = (sum(column) / len(rates) for column in zip(*rates, strict=True))
        spread = sum((n - mean_n) ** 2 for n, _ in rates)
        slope = sum((n - mean_n) * (r - mean_rate) for n, r in rates) / spread if spread else 0.0
        slope = min(max(slope, 0.0), mean_rate / mean_n)  # noise may bend it either way
        return cls(mean_rate - slope * mean_n, slope)

    def seconds(self, tokens: int, held: int = 0) -> float:
        """Return the seconds for ``tokens`` in all, of which the first ``held`` are there already."""
        return self.each * (tokens - held) + self.pair * (tokens**2 - held**2)


class LoadVerdict(NamedTuple):
    """What to do with a prefix, and the seconds that both ways take."""

    load: bool
    loading: float
    computing: float


def load_or_recompute(
    nbytes: int,
    tokens: int,
    *,
    rate: float,
    delay: float,
    unpacking: float,
    computing: Recomputing,
    held: int = 0,
) -> LoadVerdict:
    """Return whether a packed cache of ``nbytes`` should be loaded over a link, or computed again.

    ``rate`` of the link in bytes/s and its ``delay``, one way in seconds, are as measured; ``unpacking`` in
    packed bytes/s. A request goes and the answer comes; its parts are unpacked while others are on their
    way, so the slower of both counts, and one part of the other, which is left out. ``held``: tokens of the
    prefix that are in memory already, with which computing would go on. Errors: ``InputError``.

    >>> slow = Recomputing(each=0.003)
    >>> load_or_recompute(6_000_000, 2048, rate=2.5e6, delay=0.04, unpacking=3e7, computing=slow)
    LoadVerdict(load=True, loading=2.48, computing=6.144)
    """
    numbers = {"rate": rate, "unpacking": unpacking}
    for name, value in numbers.items():
        require(value > 0, InputError, f"{name}={value} bytes/s, expected more than 0")
    require(nbytes >= 0 and delay >= 0, InputError, f"nbytes={nbytes} and delay={delay}, expected 0 or more")
    require(0 <= held <= tokens, InputError, f"held={held} of {tokens} tokens")
    loading = 2 * delay + nbytes / min(rate, unpacking)
    again = computing.seconds(tokens, held)
    return LoadVerdict(loading < again, round(loading, 6), round(again, 6))
