"""What one follower is sent, and when: the newest version always wins. No threads, no sockets, no clock.

A patch goes from what the follower will hold to what is newest when the line is nearly free; versions between
are merged into it, so none ever waits in a queue. A patch is sent while it is made, the next one is begun
while the last bytes of one are on their way, and one that a fresh patch would overtake is given up.

A window of delivery rate x shortest round trip keeps the line busy and leaves next to nothing in queues, so a
newer version need not wait behind an older one, whatever the sockets on the way could buffer.

Source: BBR (Cardwell et al. 2016): maximum of the delivery rate, minimum of the round trip, a fast start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.state.patches.draft import Draft
from thinwire.types import PayloadError, require
from thinwire.uses.following.push.protocol import Abandon, Begin, Chunk, End, Message

UNPROVED = 1  # transfers on their way to being applied when another may begin: bounds the follower's memory
CHECK_SHARE = 0.1  # of a transfer's time that may go into fresh patches made only to compare their size
GAIN, START = 1.25, 2.0  # of the round trip's bytes: when the rate is known, and while it still grows
# Seconds of bytes above that: how late threads may notice an acknowledgement and act on it, and what a kernel
# that paces keeps back. With half of it transfers over bbr took a sixth longer than the line needed.
SLACK = 0.100
GROWN, STEADY = 1.25, 3  # the rate is known once it has not changed by so much for so many rounds
ROUNDS = 10  # round trips that a rate counts
STALE = 5.0  # seconds that a round trip counts; then it is measured anew, with a window of two chunks
EARLY = 0.010  # seconds of line that may be queued where the next patch begins, lest the line waits for it
CHUNK_TIME = 0.010  # seconds of line that a chunk takes
MIN_CHUNK, MAX_CHUNK = 1 << 12, 1 << 20  # bytes
MAX_WINDOW = 1 << 24  # bytes


class Order(NamedTuple):
    """A patch that should be made, or made only to compare, from ``base`` (0: nothing) to the newest version.

    Instead of that any version over ``above`` will do.
    """

    base: int
    number: int  # of the order
    compare: bool = False
    above: int = 0


@dataclass
class Transfer:
    """A draft on its way: ``at`` bytes of its body have been handed to the link."""

    number: int
    draft: Draft
    began: float
    at: int = 0
    compared: int = 0  # newest version that this one was compared with
    compared_at: float = 0.0

    @property
    def left(self) -> int:
        """Bytes that are there to be sent; more may come until the draft is whole."""
        return self.draft.nbytes - self.at


def useless(left: int, fresh: int) -> bool:
    """Return whether a transfer should be given up: ``left`` bytes of it against those of a fresh patch.

    The fresh one starts from the same version and leads further, so with it nothing else has to follow.

    >>> useless(left=900, fresh=1000), useless(left=1100, fresh=1000)
    (False, True)
    """
    return left > fresh


class SendSchedule:
    """The transfers to one follower. Events go in, ``order`` and ``messages`` say what to do about them."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.greeted = False  # the follower has said what it holds, and has the layout
        self.held = 0  # the version it holds; 0: none that is known here
        self.sending: Transfer | None = None
        self.unproved: deque[Transfer] = deque()  # sent, and not yet applied
        self.delivered = 0  # transfers applied
        self.abandoned = 0
        self._next: Draft | None = None
        self._outbox: deque[Message] = deque()
        self._ordered: Order | None = None
        self._comparing: Transfer | None = None
        self._numbers = self._orders = self._floor = 0
        self._settled = 0  # transfers up to this number are of no more interest

    # what happened

    def hello(self, held: int, part: tuple[Draft, int] | None, now: float, floor: int = 0) -> None:
        """Start afresh with a follower that holds ``held``, and so many bytes of a draft: its ``part``.

        ``floor``: the number it knows that by; it takes none that is not above.
        """
        self.pace, self.greeted, self._floor = Pace(), True, max(floor, held)
        self._restart(held)
        if part is not None:
            self._begin(part[0], now, part[1])

    def done(self, number: int, version: int, content: int) -> bool:
        """Note that a transfer was applied; False for one that is not awaited.

        Errors: ``PayloadError`` where it led elsewhere.
        """
        if not self.unproved or self.unproved[0].number != number:
            return False
        draft = self.unproved.popleft().draft
        right = (version, content) == (draft.version, draft.hash)
        require(right, PayloadError, f"version {version} is held where {draft.version} was sent")
        self.held, self.delivered = version, self.delivered + 1
        self._floor = max(self._floor, version)
        return True

    def again(self, number: int, held: int) -> None:
        """Note that the follower could not use transfer ``number``, and holds ``held``; counts once."""
        if number <= self._settled:
            return
        self._settled = self._numbers
        if self.sending is not None:
            self._outbox.append(Abandon(self.sending.number, 0))
        self._restart(held)

    def made(self, order: Order, draft: Draft, now: float) -> None:
        """Take the draft that an order asked for; one that is not wanted any more is dropped."""
        if self._ordered is None or order.number != self._ordered.number:
            return
        compared, self._ordered, self._comparing = self._comparing, None, None
        if compared is None:
            # begun for others, it may be of a version before what this one holds: then another is ordered
            self._next = draft if draft.version > order.above else None
        elif self.sending is compared and useless(compared.left, draft.nbytes):
            self._outbox.append(Abandon(compared.number, draft.version))
            self.sending, self._next, self.abandoned = None, draft, self.abandoned + 1

    # what to do

    @property
    def expected(self) -> int:
        """The version that the follower holds once all that was begun is applied."""
        last = self.sending or (self.unproved[-1] if self.unproved else None)
        return last.draft.version if last is not None else self.held

    @property
    def under_way(self) -> list[Draft]:
        """What was begun and is not applied yet, as far as is known; a few at most, the oldest first."""
        sending = [self.sending] if self.sending is not None else []
        return [transfer.draft for transfer in [*self.unproved, *sending]]

    def order(
        self, newest: int, now: float, making: float, compare: bool = True, lead: float | None = None
    ) -> Order | None:
        """Return the patch that should be made now, if any; it takes about ``making`` seconds.

        ``compare``: whether one may be made only to see whether it is smaller than what is left to send.
        ``lead``: seconds until the first of it can be sent, where that is before it is whole.
        """
        if not self.greeted or self._ordered is not None or self._next is not None:
            return None
        if newest > max(self.expected, self._floor) and self._nearly_free(making if lead is None else lead):
            return self._placed(self.expected)
        sending = self.sending
        if compare and sending is not None and self._worth_comparing(sending, newest, now, making):
            sending.compared, sending.compared_at = newest, now
            self._comparing = sending
            return self._placed(sending.draft.base, compare=True)
        return None

    def messages(self, now: float, send: Callable[[Message], bool] = lambda message: True) -> list[Message]:
        """Return what is sent now, until the window is used up, nothing is left, or ``send`` is False.

        ``send`` says whether a message was taken: one that was not comes first the next time.
        """
        found = list[Message]()
        while (message := self._upcoming(now)) is not None and send(message):
            self._sent(message, now)
            found.append(message)
        return found

    def _restart(self, held: int) -> None:
        self.held, self.sending, self._next = held, None, None
        self._ordered = self._comparing = None
        self.unproved.clear()

    def _placed(self, base: int, compare: bool = False) -> Order:
        self._orders += 1
        self._ordered = Order(base, self._orders, compare, max(base, self._floor))
        return self._ordered

    def _begin(self, draft: Draft, now: float, start: int) -> None:
        self._numbers += 1
        self.sending = Transfer(self._numbers, draft, now, start, draft.version, now)
        ends = (draft.base, draft.base_hash, draft.version, draft.hash)
        self._outbox.append(Begin(self._numbers, *ends, start))

    def _upcoming(self, now: float) -> Message | None:
        """Return what should be sent next; None where nothing should be now."""
        free = not self._outbox and self.sending is None and len(self.unproved) <= UNPROVED
        if free and self._next is not None:
            draft, self._next = self._next, None
            self._begin(draft, now, 0)
        if self._outbox:
            return self._outbox[0]
        sending = self.sending
        if sending is None:
            return None
        whole = sending.draft.whole  # asked first: what is there then is all
        if not sending.left:
            return End(sending.number, sending.at, sending.draft.head) if whole else None
        if not self.pace.room:
            return None
        return Chunk(sending.number, sending.at, sending.draft.cut(sending.at, self.pace.chunk))

    def _sent(self, message: Message, now: float) -> None:
        """Move on: ``message``, which was upcoming, was taken by the link."""
        sending = self.sending
        if sending is not None and isinstance(message, Chunk):
            self.pace.sent(len(message.data), now)
            sending.at += len(message.data)
        elif sending is not None and isinstance(message, End):
            self.unproved.append(sending)
            self.sending = None
        else:
            self._outbox.popleft()

    def _nearly_free(self, lead: float) -> bool:
        """Return whether a patch that is begun now would be there just when the line is free."""
        if self.sending is not None and not self.sending.draft.whole:
            return False
        left = self.sending.left if self.sending is not None else 0
        begun = len(self.unproved) + (self.sending is not None)
        return begun <= UNPROVED and self.pace.queued(left) <= lead + EARLY

    def _worth_comparing(self, sending: Transfer, newest: int, now: float, making: float) -> bool:
        if not sending.draft.base or newest <= sending.compared:  # a keyframe is as large as the last one
            return False
        if not sending.draft.whole:  # nobody knows yet how much is left
            return False
        long = sending.left > 2 * self.pace.window and self.pace.queued(sending.left) > 2 * making
        return long and now - sending.compared_at >= making / CHECK_SHARE


@dataclass(frozen=True)
class _SentChunk:
    total: int  # bytes sent, this chunk included
    at: float
    delivered: int  # bytes acknowledged when it left
    delivered_at: float  # when the last of those was
    first_at: float  # when the chunk acknowledged last had left
    full: bool  # the window was used up: its rate tells what the line can do
    alone: bool  # next to nothing was before it: its trip tells how long the way is


class Pace:
    """The window of one follower: ``room`` says what may be sent, ``sent`` and ``acked`` move it.

    >>> pace = Pace()
    >>> pace.sent(pace.room, now=0.0)
    >>> pace.room
    0
    >>> pace.acked(8192, now=0.1)
    >>> pace.rate, pace.room
    (81920.0, 24576)
    """

    def __init__(self) -> None:
        self.total = 0  # bytes sent
        self.delivered = 0  # bytes acknowledged
        self._trips: deque[tuple[float, float]] = deque()  # when, and round trips, rising
        self._alone_at = math.inf  # when one was measured last that had no queue before it
        self._delivered_at = self._first_at = -math.inf
        self._sent: deque[_SentChunk] = deque()
        self._rates: deque[tuple[int, float]] = deque()  # round and rate, rates falling
        self._round, self._round_ends = 0, 0
        self._plateau, self._steady = 0.0, 0
        self._probing = False

    @property
    def rate(self) -> float | None:
        """Bytes per second that the line carries; None where nothing was measured yet."""
        return self._rates[0][1] if self._rates else None

    @property
    def trip(self) -> float | None:
        """The shortest of the recent round trips in seconds; None where nothing was measured yet."""
        return self._trips[0][1] if self._trips else None

    @property
    def flight(self) -> int:
        """Bytes sent and not acknowledged."""
        return self.total - self.delivered

    @property
    def chunk(self) -> int:
        """Bytes that the next chunk should have."""
        return int(min(max((self.rate or 0.0) * CHUNK_TIME, MIN_CHUNK), MAX_CHUNK))

    @property
    def window(self) -> int:
        """Bytes that may be on their way; never below two chunks."""
        least = 2 * self.chunk
        if self.rate is None or self.trip is None or self._probing:
            return least
        gain = GAIN if self._steady >= STEADY else START
        return int(min(max(least, self.rate * (gain * self.trip + SLACK)), MAX_WINDOW))

    @property
    def room(self) -> int:
        """Bytes that may be sent now; where there are any, a whole chunk may."""
        return max(0, self.window - self.flight)

    def sent(self, nbytes: int, now: float) -> None:
        """Note that ``nbytes`` leave."""
        if not self.flight:
            self._delivered_at = self._first_at = now
        self._probing = self._probing or now - self._alone_at > STALE
        alone = self.flight <= self.chunk or self.queued(0) <= EARLY
        self.total += nbytes
        full = self.flight + self.chunk >= self.window
        self._sent.append(
            _SentChunk(self.total, now, self.delivered, self._delivered_at, self._first_at, full, alone)
        )

    def acked(self, total: int, now: float) -> None:
        """Note that the follower has ``total`` bytes; ``PayloadError`` where that cannot be."""
        require(
            self.delivered <= total <= self.total,
            PayloadError,
            f"an acknowledgement of {total} bytes, between {self.delivered} and {self.total} expected",
        )
        newest = None
        self.delivered = total
        while self._sent and self._sent[0].total <= total:
            newest = self._sent.popleft()
        self._delivered_at = now
        if newest is not None:
            self._first_at = newest.at
            self._tripped(newest, now)
            self._rated(newest, now)

    def queued(self, nbytes: int) -> float:
        """Return how long the line is busy with ``nbytes`` more and what queues before it, in seconds.

        What is on its way already does not count. While the rate is not known, anything takes for ever.
        """
        if not nbytes + self.flight:
            return 0.0
        return (nbytes + self.flight) / self.rate - (self.trip or 0.0) if self.rate else math.inf

    def _tripped(self, chunk: _SentChunk, now: float) -> None:
        trip = now - chunk.at
        if chunk.alone:
            self._alone_at, self._probing = now, False
        elif self.trip is not None and trip > self.trip:
            return  # there was a queue before it
        while self._trips and self._trips[-1][1] >= trip:
            self._trips.pop()
        self._trips.append((now, trip))
        while now - self._trips[0][0] > STALE and len(self._trips) > 1:
            self._trips.popleft()

    def _rated(self, chunk: _SentChunk, now: float) -> None:
        # acknowledgements may come in bursts: no faster than the chunks had left
        took = max(now - chunk.delivered_at, chunk.at - chunk.first_at, 1e-6)
        rate = (self.delivered - chunk.delivered) / took
        if chunk.delivered >= self._round_ends:
            self._next_round()
        if chunk.full or rate > (self.rate or 0.0):
            while self._rates and self._rates[-1][1] <= rate:
                self._rates.pop()
            self._rates.append((self._round, rate))
        while self._rates and self._rates[0][0] < self._round - ROUNDS and len(self._rates) > 1:
            self._rates.popleft()

    def _next_round(self) -> None:
        self._round += 1
        self._round_ends = self.total
        rate = self.rate or 0.0
        if self._plateau / GROWN <= rate <= self._plateau * GROWN:
            self._steady += 1
        else:
            self._steady, self._plateau = 0, rate
