"""TCP's window after a pause: what a message then costs, and what its time then says of the line.

After a pause longer than its retransmission timeout, a sender whose control is of the kind of cubic or reno
halves its window once for each timeout, down to ten segments, and doubles it again each round trip. A message
that does not fit waits round trips, on a line that is idle meanwhile.

Source: RFC 2861 and RFC 6928; Linux's ``tcp_cwnd_restart``, whose timeout is a round trip and 0.2 s or more.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 14_480  # bytes: ten segments of 1448
TIMEOUT = 0.2  # seconds, and a round trip


@dataclass(eq=False)
class Line:
    """What one machine sends to another; seconds throughout, of line time where a window is meant."""

    free: float = 0.0  # when the last byte of the last message has left
    window: float = 0.0  # what may be under way

    def send(self, now: float, transfer: float, trip: float, first: float = 0.0) -> float:
        """Return when the last byte of a message has left.

        ``transfer``: the line's time for it; ``trip``: a round trip; ``first``: what TCP sends at once after
        a long pause, 0 for one that goes on as it was.

        >>> round(Line().send(0.0, transfer=0.06, trip=0.1, first=0.01), 3)  # idle for 0.09 and 0.08
        0.23
        """
        start = max(now, self.free)
        waits = self._opening(start - self.free, transfer, trip, first) if first else 0.0
        self.free = start + waits + transfer
        return self.free

    def _opening(self, pause: float, transfer: float, trip: float, first: float) -> float:
        """Return how long the line is idle in this message, because no more may be under way."""
        halvings = min(64, int(pause / (trip + TIMEOUT)))
        window, left, waits = max(first, self.window / 2**halvings), transfer, 0.0
        while window < min(left, trip):
            waits += trip - window
            left -= window
            window *= 2
        # one that is not filled does not grow
        self.window = window + min(left, window) if left > window / 2 else window
        return waits


def idle_seconds(nbytes: int, seconds: float, trip: float) -> float:
    """Return for how much of its ``seconds`` a message may have left the line idle, its window shut at first.

    >>> round(idle_seconds(20_000, seconds=0.101, trip=0.1), 3)  # all but the line's 4 ms
    0.097
    """
    sent, window, waits = 0, FIRST, 0.0
    rounds = 1
    while sent + window < nbytes and seconds > rounds * trip:
        sent += window
        rate = (nbytes - sent) / (seconds - rounds * trip)
        if window >= rate * trip:
            break  # by then the line was full
        waits = rounds * trip - sent / rate
        window, rounds = 2 * window, rounds + 1
    return waits
