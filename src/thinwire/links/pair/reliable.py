"""A link that repairs what the one below loses, repeats, reorders or corrupts, and notices a lost peer."""

from __future__ import annotations

import math
import secrets
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import ClassVar

from thinwire.links.inbox import ASLEEP, Inbox, failed, renewed
from thinwire.links.link import Link, LinkEstimate
from thinwire.links.message import Message
from thinwire.links.metered import redial
from thinwire.links.pair.buffers import keep_freed
from thinwire.links.pair.estimate import Estimator
from thinwire.links.pair.pieces import LARGE, PieceQueue
from thinwire.links.pair.segment import (
    DATA,
    HEADER,
    PING,
    PONG,
    TAKES,
    TICK,
    Kind,
    Segment,
    pack,
    parse,
    ticks,
)
from thinwire.links.pair.window import ReceiveWindow, SendWindow
from thinwire.links.tcp.counts import KernelCounts
from thinwire.types import LinkError, PayloadError

PIECE = 1 << 17  # bytes of a message in one segment, at most: a lost one is cheap, and each is a sign of life
LEAST_PIECE = 1 << 10  # bytes
FAST = LARGE / 0.04  # bytes/s from which a line is fast: a large piece takes it 40 ms at most
JUDGED = 0.02  # seconds between two looks at whether it is
AHEAD = 2  # pieces that the link below may have to hand over yet
ACK_DELAY = 0.005  # seconds that an acknowledgement waits for others, or for data to ride on
HEARTBEAT = 1.0  # seconds
LIVELY = 1 << 10  # bytes that come from one heartbeat to the next where a piece does: handshakes have fewer
SLOWEST = PIECE // LIVELY  # heartbeats that a piece takes at most; the bytes may be a stranger's
FIRST_TRIPS = 4  # heartbeats answered with the next one at once, so there is an estimate from the start
FAREWELL = 0.5  # seconds to hand over the last words
PATIENCE = 0.5  # seconds, at least, before a NACK is repeated
LIMIT = 1 << 31  # bytes
MAX_SEGMENT = LARGE + HEADER


class Reliable:
    """Deliver every message of ``link`` once, in order and intact, or fail after ``deadline`` s of silence.

    Messages are cut into numbered pieces with a check sum and acknowledged together; a piece is sent again
    only when the peer reports it missing (selective repeat). Heartbeats go out each second with a time
    stamp; they measure the round trip by this end's clock alone and reveal the loss of a last message. A
    send is done when the peer has the message. Memory: messages are kept until then; more than ``limit``
    bytes of them fail. ``piece``: see ``piece_size``. ``kernel`` counts what the connections below bring: a
    line too slow for a piece in a quarter of the deadline is not silent while a part of one comes.
    ``ahead``: pieces that the link below may have yet to hand over; what comes after them waits here. Then on
    a fast line small messages are put together, and large ones are sent from where they lie. None: the link
    below, which may keep a timetable, gets everything at once.

    Errors, all ``LinkError`` and on every pending and later future: silence for ``deadline`` seconds
    (``first_deadline`` before the first sign of life), the peer closed the link, the peer was restarted.
    """

    def __init__(
        self,
        link: Link,
        deadline: float = 20.0,
        first_deadline: float | None = None,
        heartbeat: float = HEARTBEAT,
        max_message: int = LIMIT,
        limit: int = LIMIT,
        piece: int = PIECE,
        kernel: KernelCounts | None = None,
        ahead: int | None = None,
    ) -> None:
        keep_freed()
        self.deadline = deadline
        self.piece = piece  # bytes of a message in one segment
        self.resent = 0  # segments sent again
        self.damaged = 0  # segments that arrived corrupted
        self._link = link
        self._kernel = kernel
        self._came: int | None = None  # bytes, by the heartbeat before, where the peer was silent then
        self._heartbeat = min(heartbeat, deadline / 8)  # two at least before a new connection is asked for
        self._first_deadline = max(deadline, first_deadline or 0.0)
        self._session = secrets.randbits(32)
        self._peer_session: int | None = None
        self._inbox = Inbox()
        self._estimator = Estimator()
        self._out, self._in = SendWindow(limit), ReceiveWindow(max_message)
        self._queue = PieceQueue()
        self._ahead, self._below = ahead, 0  # pieces that the link below has yet to hand over
        self._pumping = False
        self._takes = 0  # bytes of the largest piece that the peer says to take
        self._fast, self._judged = False, -math.inf  # whether the line is known to be, since when
        self._lock = threading.RLock()
        self._settled = threading.Condition(self._lock)  # all acknowledged, or the link failed
        self._error: LinkError | None = None
        self._unsent: BaseException | None = None  # why the link below sends no more
        self._closing = False
        self._parted = False  # whether last words are on their way
        self._stopped = False
        now = monotonic()
        self._heard = self._spoke = self._turned = now
        self._ping_at = now
        self._idled = now  # when the newest heartbeat left that was behind nothing
        self._redialled = now
        self._ack_at: float | None = None  # when the acknowledgement is due
        self._arrived_at = now  # when the newest data came
        self._wake = threading.Event()
        self.alive = threading.Event()  # set by the peer's first sign of life, or a failure
        self._next = self._listen()
        self._thread = threading.Thread(target=self._run, name=f"reliable link to {self.peer}", daemon=True)
        self._thread.start()

    @property
    def peer(self) -> str:
        return self._link.peer

    @property
    def repeated(self) -> int:
        """Segments that arrived more than once."""
        return self._in.repeated

    def wait_alive(self, timeout: float) -> None:
        """Wait for the peer's first sign of life; ``LinkError`` after ``timeout`` seconds or on a failure."""
        if not self.alive.wait(timeout):
            raise LinkError(f"waited {timeout:g} s for a first sign of life from {self.peer}")
        if self._error is not None and self._peer_session is None:
            raise renewed(self._error)

    def send(self, data: Message, label: str = "control") -> Future[None]:
        with self._lock:
            if self._error is not None or self._closing:
                return failed(self._error or self._closed_here())
            behind = self._out.flight + self._queue.nbytes
            if len(data) > self._out.limit:
                told = f"a message of {len(data)} bytes to {self.peer}; at most {self._out.limit} go at once"
                return failed(LinkError(f"{told}: compress it, or send less at a time"))
            if behind + len(data) > self._out.limit:
                return failed(LinkError(f"{self.peer} is {behind} bytes behind, at the limit"))
            done = self._queue.add(data, label, self._sent_at())
            self._pump()
        return done

    def recv(self) -> Future[Message]:
        return self._inbox.get()

    def more(self) -> deque[Message]:
        return self._inbox.more()

    def estimate(self) -> LinkEstimate:
        with self._lock:
            return self._estimator.estimate(monotonic(), self._out.oldest())

    @property
    def idle(self) -> bool:
        """Whether the peer has acknowledged everything."""
        return not self._out and not self._queue

    @property
    def moved(self) -> tuple[int, int]:
        """Segments that arrived and that were acknowledged, in order, heartbeats left out."""
        return self._in.got, self._out.acknowledged

    @property
    def restarts(self) -> bool:
        """Whether the TCP below is said to shut its window in pauses."""
        return self._estimator.restarts

    def expect_restarts(self, restarts: bool) -> None:
        """Say whether the TCP below shuts its window in pauses: what that costs is not the line's."""
        with self._lock:
            self._estimator.restarts = restarts

    def forget_estimate(self) -> None:
        """Measure anew: the link is another one from now on."""
        with self._lock:
            self._estimator = Estimator(monotonic(), self._estimator.restarts)
            if self._error is None and not self._closing:
                self._ping()

    def close(self, timeout: float = 5.0) -> None:
        with self._lock:
            first, self._closing = not self._closing, True
            self._settled.wait_for(lambda: self.idle or self._error is not None, timeout)
            if first and self._error is None:
                self._part()
            self._stopped = True
            # all is acknowledged, so only the farewell is on its way, and the peer may be gone by then
            grace = FAREWELL + 2 * (self._estimator.smoothed or 0.0) if self._parted else 0.0
        self._wake.set()
        self._thread.join(10.0)
        self._link.close(grace)
        self._fail(self._closed_here())

    def _sent_at(self) -> float | None:
        # waiting for a peer to start is no transfer
        return None if self._peer_session is None else monotonic()

    def _closed_here(self) -> LinkError:
        return LinkError(f"this end closed the link to {self.peer}")

    # sending

    def _pump(self) -> None:
        """Send what waits, while the link below has not enough to hand over."""
        if self._pumping:  # a link that hands over at once calls back before it returns
            return
        self._pumping = True
        try:
            while self._queue and (self._ahead is None or self._below < self._ahead):
                cut = self._queue.next(self.piece, self._fast)
                number = self._out.add(cut.kind, cut.label, cut.body, cut.at, *cut.done)
                self._below += 1
                self._emit(cut.kind, cut.label, cut.body, number).add_done_callback(self._relieved)
        finally:
            self._pumping = False

    def _relieved(self, sent: Future[None]) -> None:
        """Go on, on the thread of the link below."""
        try:
            with self._lock:
                self._below -= 1
                if self._error is None:
                    self._pump()
        except Exception as e:  # of the link below: told to whoever waits
            self._unsent = e
            self._wake.set()

    def _emit(self, kind: Kind, label: str, body: Message, number: int) -> Future[None]:
        data = pack(
            kind,
            label,
            body,
            session=self._session,
            number=number,
            ack=self._in.got,
            repair=self._out.repair,
            arrived=ticks(self._arrived_at),
        )
        self._ack_at = None  # it rides on this one
        sent = self._link.send(data, label)
        sent.add_done_callback(self._handed_over)
        return sent

    def _handed_over(self, sent: Future[None]) -> None:
        if not sent.cancelled() and (error := sent.exception()) is not None:
            self._unsent = error
            self._wake.set()

    def _control(self, kind: Kind, body: bytes = b"") -> None:
        body = TAKES.pack(LARGE) if kind == Kind.ACK else body
        self._emit(kind, "control", body, self._out.top)

    def _part(self) -> None:
        self._parted = True
        self._control(Kind.BYE)

    def _ping(self) -> None:
        now = monotonic()
        self._ping_at = now + self._heartbeat
        self._idled = now if self.idle else self._idled
        silent = int(max(0.0, now - self._heard) * 1e3) if self._peer_session is not None else 0
        self._control(Kind.PING, PING.pack(int(now * 1e6), min(silent, 0xFFFFFFFF)))

    # the thread

    def _listen(self) -> Future[Message]:
        future = self._link.recv()
        future.add_done_callback(lambda _: self._wake.set())
        return future

    def _run(self) -> None:
        try:
            while not self._stopped and self._error is None:
                self._wake.wait(self._pause())
                self._wake.clear()
                self._receive()
                self._check_sends()
                self._keep_time()
        except LinkError as e:
            self._fail(e)
        except (PayloadError, struct.error) as e:
            self._fail(LinkError(f"{self.peer} broke the protocol: {e}"))
        except Exception as e:  # told to whoever waits, who would else do so until a deadline
            self._fail(LinkError(f"the reliable link to {self.peer} failed: {type(e).__name__}: {e}"))
            raise

    def _pause(self) -> float:
        with self._lock:
            due = self._ping_at if self._ack_at is None else min(self._ping_at, self._ack_at)
        return max(0.0, due - monotonic())

    def _receive(self) -> None:
        while self._next.done() and not self._stopped:
            error = self._next.exception()
            if error is not None:
                raise self._lost(error)
            came = self._link.more()
            came.appendleft(self._next.result())
            self._next = self._listen()
            while came and not self._stopped:
                self._read(came.popleft())  # and let go of it: the next is received where it lay

    def _read(self, data: Message) -> None:
        try:
            segment = parse(data)
        except PayloadError:
            self._damage()
        else:
            self._take(segment)

    def _check_sends(self) -> None:
        """Fail with the way out, though the way in may work: after what came in, which may know better."""
        if self._unsent is not None and not self._stopped:
            raise self._lost(self._unsent)

    def _lost(self, error: BaseException) -> LinkError:
        if isinstance(error, LinkError):
            return error
        return LinkError(f"the link to {self.peer} failed: {error}")

    def _damage(self) -> None:
        with self._lock:
            self.damaged += 1
            self._ping()  # the answer tells what the peer had sent, so what is missing

    def _take(self, segment: Segment) -> None:
        now = monotonic()
        with self._lock:
            self._check_session(segment)
            self._heard = self._spoke = now
            self.alive.set()
            self._acknowledged(segment, now)
            data = segment.kind in DATA
            whole = self._in.accept(segment.number, segment.kind, *segment.buffers) if data else []
            if data:
                self._arrived_at = now
                self._ack_at = self._ack_at or now + ACK_DELAY
                if now >= self._ack_at:  # though more waits to be read, as on a busy line it always does
                    self._control(Kind.ACK)
            self._in.note(segment.number, segment.repair)
            self._ask(now)
            self._ANSWERS.get(segment.kind, lambda *_: None)(self, segment)
        if whole:
            self._inbox.put(*whole)
        if segment.kind == Kind.BYE:
            raise LinkError(f"{self.peer} closed the link")

    def _check_session(self, segment: Segment) -> None:
        if self._peer_session is None:
            if segment.ack > self._out.top:  # of what an earlier process of this rank sent
                self._part()  # tells the peer of this one, before its deadline does
                raise LinkError(f"{self.peer} still talks to an earlier start of this rank; start all again")
            self._peer_session = segment.session
            self._control(Kind.ACK)  # tells the peer what this end takes
        elif segment.session != self._peer_session:
            raise LinkError(f"{self.peer} was restarted in the middle of the exchange; start all ranks again")

    def _acknowledged(self, segment: Segment, now: float) -> None:
        done, run = self._out.acknowledge(segment.ack)
        if run is not None:
            self._estimator.delivered(run, segment.arrived, now)
            self._judge(now)
        if self.idle:
            self._settled.notify_all()
            if now - self._idled >= self._heartbeat:
                self._ping()  # on an idle line: behind data it measures the queue
        for future in done:
            future.set_result(None)

    def _judge(self, now: float) -> None:
        """Find out whether the line is fast, if the peer can read what goes over fast ones."""
        if self._ahead is not None and self._takes >= LARGE and now - self._judged > JUDGED:
            self._judged, rate = now, self._estimator.estimate(now).rate
            self._fast = rate is not None and rate >= FAST

    def _on_ack(self, segment: Segment) -> None:
        if len(segment.body) == TAKES.size:  # earlier versions take no large pieces, and say nothing
            (self._takes,) = TAKES.unpack(segment.body)

    def _ask(self, now: float) -> None:
        body = self._in.nack(now, max(PATIENCE, 4 * (self._estimator.smoothed or 0.0)))
        if body is not None:
            self._control(Kind.NACK, body)

    def _on_ping(self, segment: Segment) -> None:
        clock, silent = PING.unpack(segment.body)
        self._control(Kind.PONG, PONG.pack(clock, ticks(self._heard)))
        if silent * 1e-3 > self.deadline / 4:  # we hear the peer, it does not hear us: a broken connection
            self._redial()

    def _on_pong(self, segment: Segment) -> None:
        clock, arrived = PONG.unpack(segment.body)
        self._estimator.round_trip(clock * TICK, arrived, monotonic())
        if self._estimator.trips < FIRST_TRIPS:
            self._ping()

    def _on_nack(self, segment: Segment) -> None:
        repair, lost = self._out.again(segment.body)
        for number, sent in lost:
            self._emit(sent.kind, sent.label, sent.body, number)
        self.resent += len(lost)
        self._out.repair = repair  # only now: it tells the peer that all of them are on their way before this
        self._control(Kind.ACK)

    def _keep_time(self) -> None:
        now = monotonic()
        with self._lock:
            if now - self._turned > ASLEEP + self._heartbeat:
                self._heard = min(now, self._heard + now - self._turned)  # the peer may have spoken since
            self._turned = now
            if self._ack_at is not None and now >= self._ack_at:
                self._control(Kind.ACK)
            if now >= self._ping_at:
                self._watch_pieces(now)
                self._ping()
                self._ask(now)
            self._check_silence(now)

    def _watch_pieces(self, now: float) -> None:
        """Take what came of a piece since the heartbeat before for a sign of life."""
        silent = self._heartbeat <= now - self._heard and now - self._spoke < SLOWEST * self._heartbeat
        totals = self._kernel.read() if silent and self._kernel is not None else None
        before, self._came = self._came, None if totals is None else totals.received
        if before is not None and self._came is not None and self._came - before >= LIVELY:
            self._heard = now

    def _check_silence(self, now: float) -> None:
        silent = now - self._heard
        deadline = self.deadline if self._peer_session is not None else self._first_deadline
        if silent > deadline:
            raise LinkError(f"{self.peer} has not answered for {deadline:g} s")
        if self._peer_session is not None and silent > self.deadline / 4:
            self._redial()

    def _redial(self) -> None:
        now = monotonic()
        if now - self._redialled > self.deadline / 4:
            self._redialled = now
            redial(self._link)

    def _fail(self, error: LinkError) -> None:
        with self._lock:
            self._error = self._error or error
            lost = self._out.drain() + self._queue.drain()
            self._settled.notify_all()
        self.alive.set()
        for future in lost:
            future.set_exception(renewed(self._error))
        self._inbox.fail(self._error)

    _ANSWERS: ClassVar[dict[Kind, Callable[[Reliable, Segment], None]]] = {
        Kind.ACK: _on_ack,
        Kind.PING: _on_ping,
        Kind.PONG: _on_pong,
        Kind.NACK: _on_nack,
    }


def piece_size(rate: float | None, deadline: float) -> int:
    """Return bytes of a piece that a line of ``rate`` bytes/s delivers in a tenth of ``deadline`` seconds.

    That is well before the other end takes the line for broken. ``rate`` None: not known to be slow.

    >>> piece_size(None, 20.0), piece_size(125e3, 20.0), piece_size(5e3, 20.0)
    (131072, 131072, 10000)
    """
    return PIECE if rate is None else int(min(PIECE, max(LEAST_PIECE, rate * deadline / 10)))
