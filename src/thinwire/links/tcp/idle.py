"""TCP's window after a pause: what a message then costs, and what its time then says of the line.

After a pause longer than its retransmission timeout, a sender whose control is of the kind of cubic or reno
halves its window once for each timeout, down to ten segments, and doubles it again each round trip. A message
that does not fit waits round trips, on a line that is idle meanwhile.

Source: RFC 2861 and RFC 6928; Linux's ``tcp_cwnd_restart``, whose timeout is a round trip and 0.2 s or more.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_WINDOW = 14_480  # bytes: ten segments of 1448
TIMEOUT = 0.2  # seconds, and a round trip


def opened(window: float, sent: float) -> float:
    """Return what a window has become once so much was sent: as much more as was sent of what it let through.

    >>> opened(15_000, 50_000), opened(15_000, 5_000)
    (60000, 15000)
    """
    while window < sent:
        sent -= window
        window *= 2
    return window + sent if sent > window / 2 else window  # one that is not filled does not grow


def rounds(nbytes: float, window: float = FIRST_WINDOW) -> int:
    """Return how many windows a message fills before the one in which its last byte leaves.

    >>> rounds(14_000), rounds(20_000), rounds(295_000)
    (0, 1, 4)
    """
    filled = 0
    while window < nbytes:
        nbytes -= window
        window, filled = 2 * window, filled + 1
    return filled


def idle_seconds(nbytes: float, seconds: float, trip: float, window: float = FIRST_WINDOW) -> float:
    """Return for how much of its ``seconds`` a message may have left the line idle, for want of window.

    >>> round(idle_seconds(20_000, seconds=0.101, trip=0.1), 3)  # all but the line's 4 ms
    0.097
    """
    sent, waits, trips = 0.0, 0.0, 1
    while sent + window < nbytes and seconds > trips * trip:
        sent += window
        rate = (nbytes - sent) / (seconds - trips * trip)
        if window >= rate * trip:
            break  # by then the line was full
        waits = trips * trip - sent / rate
        window, trips = 2 * window, trips + 1
    return waits


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
        waits = 0.0
        if first:
            timeouts = min(64, int((start - self.free) / (trip + TIMEOUT)))
            window = max(first, self.window / 2**timeouts)
            waits, self.window = waiting(transfer, trip, window), opened(window, transfer)
        self.free = start + waits + transfer
        return self.free


def waiting(transfer: float, trip: float, window: float) -> float:
    """Return how long the line is idle in a message, because no more may be under way; in seconds all.

    >>> round(waiting(transfer=0.06, trip=0.1, window=0.01), 3)
    0.17
    """
    waits = 0.0
    while window < min(transfer, trip):
        waits += trip - window
        transfer -= window
        window *= 2
    return waits
