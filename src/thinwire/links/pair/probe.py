"""A short measurement of an idle link, so that there is an estimate before the first message that matters."""

from __future__ import annotations

import math
import os
from concurrent.futures import Future
from time import monotonic

from thinwire.links.base import LinkEstimate
from thinwire.links.mailbox import FILLER, Mailbox
from thinwire.links.pair.reliable import Reliable

NBYTES = 1 << 18
SECONDS = 0.5
FIRST = 1 << 13  # bytes of the first train; each later one has twice as many
ENOUGH = 0.02  # seconds of line time of a train that tell the rate,
SAME = 0.8  # and the share of its time below which a repetition tells otherwise


def probe(
    mailbox: Mailbox, reliable: Reliable, nbytes: int = NBYTES, seconds: float = SECONDS
) -> Future[LinkEstimate]:
    """Send trains of growing size to the peer, which drops them; return the estimate that comes of it.

    A train that holds the line for less than 20 ms is followed by one twice as long; any other is repeated,
    because TCP may just have found its window, and if that is no faster it is the last. At most ``nbytes``
    bytes and about ``seconds`` of line time are spent; the first train, of 8 kB, goes out in any case. A link
    that is carrying messages measures itself: then nothing is sent. Each end probes its own direction.
    """
    done: Future[LinkEstimate] = Future()
    done.set_running_or_notify_cancel()
    if reliable.idle:
        _Probe(mailbox, reliable, nbytes, seconds, done).send(FIRST)
    else:
        done.set_result(reliable.estimate())
    return done


class _Probe:
    def __init__(
        self, mailbox: Mailbox, reliable: Reliable, nbytes: int, seconds: float, done: Future[LinkEstimate]
    ) -> None:
        self._mailbox, self._reliable, self._done = mailbox, reliable, done
        self._bytes, self._seconds = nbytes, seconds  # left to spend
        self._train, self._took, self._sent = 0, 0.0, 0.0

    def send(self, train: int) -> None:
        if train != self._train:
            self._train, self._took = train, math.inf
        self._bytes -= train
        body = os.urandom(train)  # nothing on the way can compress it
        self._sent = monotonic()
        self._mailbox.send(FILLER, body).add_done_callback(self._arrived)

    def _arrived(self, sent: Future[None]) -> None:
        error = sent.exception()
        if error is not None:
            self._done.set_exception(error)
            return
        found = self._reliable.estimate()
        before, self._took = self._took, monotonic() - self._sent - (found.rtt or 0.0)
        self._seconds -= max(0.0, self._took)
        again = self._train * (2 if self._took < ENOUGH else 1)
        stable = self._took >= ENOUGH and self._took > SAME * before
        longer = self._took * again / self._train  # if it is the line that takes the time
        if stable or again > self._bytes or longer > self._seconds:
            self._done.set_result(found)
        else:
            self.send(again)
