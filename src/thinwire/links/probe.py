"""A short measurement of an idle link, so that there is an estimate before the first message that matters."""

from __future__ import annotations

import os
from concurrent.futures import Future

from thinwire.links.base import LinkEstimate
from thinwire.links.mailbox import FILLER, Mailbox
from thinwire.links.reliable import Reliable

NBYTES = 1 << 18
SECONDS = 0.5
FIRST = 1 << 13  # bytes of the first train; each later one has twice as many
ENOUGH = 0.02  # seconds of line time of a train that tell the rate


def probe(
    mailbox: Mailbox, reliable: Reliable, nbytes: int = NBYTES, seconds: float = SECONDS
) -> Future[LinkEstimate]:
    """Send trains of growing size to the peer, which drops them; return the estimate that comes of it.

    Ends when a train has held the line for 20 ms, and before ``nbytes`` bytes or, by what was measured
    meanwhile, ``seconds`` of line time are exceeded; the first train of 8 kB goes out in any case. A link
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
        self._train = 0

    def send(self, train: int) -> None:
        self._train = train
        self._bytes -= train
        body = os.urandom(train)  # nothing on the way can compress it
        self._mailbox.send(FILLER, body).add_done_callback(self._arrived)

    def _arrived(self, sent: Future[None]) -> None:
        error = sent.exception()
        if error is not None:
            self._done.set_exception(error)
            return
        found = self._reliable.estimate()
        train = 2 * self._train
        if found.rate is not None:
            took = self._train / found.rate
            self._seconds -= took
            if (took >= ENOUGH and not found.lower_bound) or train / found.rate > self._seconds:
                train = 0
        if 0 < train <= self._bytes:
            self.send(train)
        else:
            self._done.set_result(found)
