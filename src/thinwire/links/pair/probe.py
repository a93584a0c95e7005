"""A short measurement of an idle link, so that there is an estimate before the first message that matters."""

from __future__ import annotations

import math
import os
from concurrent.futures import Future
from time import monotonic, sleep

from thinwire.links.link import LinkEstimate
from thinwire.links.mailbox import FILLER, Mailbox
from thinwire.links.pair.reliable import Reliable
from thinwire.links.pair.segment import TICK

NBYTES = 1 << 22
SECONDS, TRIPS = 0.5, 8  # of line time: seconds, or round trips where these are more
FIRST = 1 << 13  # bytes of the first train; each later one has twice as many
ENOUGH = 0.02  # seconds of line time of a train that tell the rate,
SAME = 0.8  # and the share of its time below which a repetition tells otherwise
PATIENCE = 10.0  # seconds that one of several probes may take
ATTEMPTS = 5
PAUSE = 0.1  # seconds between two of them where no round trip is known


def probe(
    mailbox: Mailbox, reliable: Reliable, nbytes: int = NBYTES, seconds: float = SECONDS
) -> Future[LinkEstimate]:
    """Send trains of growing size to the peer, which drops them; return the estimate that comes of it.

    A train that holds the line for less than 20 ms, or a round trip where TCP may be pacing it (as bbr does,
    by the longest train before), is followed by one twice as long. Any other is repeated, because TCP may
    just have found its window, and if that is no faster it is the last. At most ``nbytes`` bytes and about
    ``seconds`` of line time, or eight round trips, are spent; the first train, of 8 kB, goes out in any case.
    A link that is carrying messages measures itself: then nothing is sent. Each end probes its own direction.
    """
    done: Future[LinkEstimate] = Future()
    done.set_running_or_notify_cancel()
    if reliable.idle:
        _Probe(mailbox, reliable, nbytes, seconds, done).send(FIRST)
    else:
        done.set_result(reliable.estimate())
    return done


def measure(mailbox: Mailbox, reliable: Reliable) -> LinkEstimate:
    """Probe once what the link carries is delivered, and again where TCP had yet to speed up."""
    for attempt in range(ATTEMPTS):
        try:
            seen = probe(mailbox, reliable).result(PATIENCE)
        except TimeoutError:  # too slow to be probed: what is known so far, which may be nothing
            return reliable.estimate()
        if seen.rate is not None and (attempt or not seen.lower_bound):
            break
        sleep(seen.rtt or PAUSE)
    return seen


class _Probe:
    def __init__(
        self, mailbox: Mailbox, reliable: Reliable, nbytes: int, seconds: float, done: Future[LinkEstimate]
    ) -> None:
        self._mailbox, self._reliable, self._done = mailbox, reliable, done
        self._nbytes, self._seconds = nbytes, seconds
        self._spent, self._best = 0, 0.0  # bytes; bytes/s of the fastest train: the line's at least
        self._train, self._took, self._sent = 0, 0.0, 0.0

    def send(self, train: int) -> None:
        if train != self._train:
            self._train, self._took = train, math.inf
        self._spent += train
        body = os.urandom(train)  # nothing on the way can compress it
        self._sent = monotonic()
        self._mailbox.send(FILLER, body).add_done_callback(self._arrived)

    def _arrived(self, sent: Future[None]) -> None:
        error = sent.exception()
        if error is not None:
            self._done.set_exception(error)
            return
        found = self._reliable.estimate()
        trip = found.rtt or 0.0
        before, self._took = self._took, max(TICK, monotonic() - self._sent - trip)
        self._best = max(self._best, self._train / self._took)
        enough = ENOUGH if self._reliable.restarts else max(ENOUGH, trip)
        again = self._train * (2 if self._took < enough else 1)
        stable = self._took >= enough and self._took > SAME * before
        spent = self._spent + again
        if stable or spent > self._nbytes or spent / self._best > max(self._seconds, TRIPS * trip):
            self._done.set_result(found)
        else:
            self.send(again)
