"""What one follower is sent, and when: the newest version always wins. No threads, no sockets, no clock.

A patch goes from what the follower will hold to what is newest when the line is nearly free; versions between
are merged into it, so none ever waits in a queue. A patch is sent while it is made, the next one is begun
while the last bytes of one are on their way, and one that a fresh patch would overtake is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.state.patches.draft import Draft
from thinwire.types import PayloadError, require
from thinwire.uses.following.push.pace import EARLY, Pace
from thinwire.uses.following.push.protocol import Abandon, Begin, Chunk, End, Message

UNPROVED = 1  # transfers on their way to being applied when another may begin: bounds the follower's memory
CHECK_SHARE = 0.1  # of a transfer's time that may go into fresh patches made only to compare their size


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


class Serving:
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
