"""The follower's end of the protocol: chunks become patches, patches are applied, and what is said back."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Protocol

from thinwire.links.hub.spoke import Spoke
from thinwire.links.hub.station import Event, EventKind
from thinwire.links.inbox import renewed
from thinwire.state.layout import MAX_NBYTES, Layout, TooLarge
from thinwire.state.patches.body import most
from thinwire.state.patches.moves import SectionReading
from thinwire.state.patches.pages import Pages
from thinwire.state.patches.patch import (
    FIELDS,
    HEAD,
    MAX_META,
    MAX_VERSION,
    Patch,
    Version,
    is_time,
    load_meta,
)
from thinwire.types import DesyncError, InputError, LinkError, PayloadError, require
from thinwire.uses.following.push import protocol
from thinwire.uses.following.push.protocol import (
    DOWN,
    MAGIC,
    NOTHING,
    PROTOCOL,
    Abandon,
    Ack,
    Again,
    Ask,
    Begin,
    Chunk,
    Done,
    End,
    Hello,
    LayoutIs,
    Message,
    Quiet,
    Same,
)

TURN = 1.0  # seconds
REST = 0.25  # seconds without a patch after which what the next one needs is done before it comes
ASKED = 0.5  # seconds at least between two HELLOs, where it is the feed that asks again
ANSWER = 5.0  # seconds without an answer after which HELLO is said again; twice as many each time after that
LONGEST = 60.0  # but no more
FAILURES = 5  # patches or messages in a row that cannot be used before the follower gives up
WAITING = 2  # patches that come or wait to be applied, besides the one that is read; those given up count too
MAX_HEAD = HEAD.size + FIELDS.size + MAX_META  # bytes


class Target(Protocol):
    """What patches are applied to: a replica, a relay's history, or both."""

    @property
    def held(self) -> Version:
        """The newest complete version."""
        ...

    @property
    def above(self) -> int:
        """The newest version number that is known here or further down."""
        ...

    def agree(self, layout: Layout, name: str) -> None:
        """Take the publisher's layout; ``InputError`` where it does not fit. Called again if it changes."""
        ...

    def reading(self, base_hash: int) -> SectionReading | None:
        """Return what reads a patch from ``base_hash`` (0: a keyframe) as it comes; None if not here."""
        ...

    def apply(self, patch: Patch, reading: SectionReading | None = None) -> Version:
        """Move on by a patch; ``PayloadError`` or ``DesyncError`` where that fails, with nothing changed.

        ``reading`` may have read some of it.
        """
        ...

    def prepare(self) -> None:
        """Do what can be done before the next patch comes."""
        ...

    def confirm(self, version: Version) -> Version:
        """Call what is held as the publisher does, and return that; errors as ``apply``."""
        ...


class Reception:
    """Receive from one feed into ``target``; two threads, one that listens, one that reads and applies.

    A patch is read as it comes, section by section, so that little is left to do when its last byte is here.

    ``arrived`` is called with each version as it is held, the bytes of its patch and the seconds it took to
    come; ``failed`` once, with what ended it. No state of over ``max_nbytes`` bytes is taken, nor one
    that has another ``name``, if that is given.
    """

    def __init__(
        self,
        spoke: Spoke,
        target: Target,
        layout: Layout | None,
        arrived: Callable[[Version, int, float], None],
        failed: Callable[[Exception], None],
        max_nbytes: int = MAX_NBYTES,
        name: str | None = None,
    ) -> None:
        self.spoke, self._target, self._layout = spoke, target, layout
        self._max_nbytes, self.name = max_nbytes, name
        self._arrived, self._failed = arrived, failed
        self.instance = NOTHING
        self.abandoned = self.restarts = self.failures = 0
        self.reached = False  # whether a connection has ever been up
        self.current = False  # whether whoever is there now sent what is held, or said that it is the newest
        self._heard = False  # and whether they have answered since the connection was made
        self._quiet_since = math.inf  # when the last sign of the publisher was, where a relay lacks one
        self._session = self._received = self._first = 0  # the first session is that of this connection
        self._answered = False
        self._asked_at = self._hello_at = 0.0  # when HELLO was said last, and when it may be again
        self._patience = ANSWER  # seconds until HELLO is said again
        self._partial: PartialPatch | None = None
        self._part: PartialPatch | None = None
        self._todo: queue.Queue[PartialPatch | None] = queue.Queue(WAITING)
        self._lock = threading.Lock()
        self._pending = 0  # patches that are whole, and queued or being applied
        self._hello_due = self._closing = False
        self._threads = [
            threading.Thread(target=run, name=f"{what} {spoke.peer}", daemon=True)
            for run, what in ((self._listen, "following"), (self._work, "applying from"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def signed(self) -> float:
        """When the publisher itself, beyond all relays, last gave a sign of life; of the monotonic clock."""
        return min(self.spoke.heard, self._quiet_since)

    def close(self) -> None:
        """End both threads; a patch that is being applied is finished first."""
        self._closing = True
        self.spoke.close()
        while self._threads[1].is_alive():
            try:
                self._todo.put(None, timeout=0.1)
                break
            except queue.Full:
                continue
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(30.0)

    def hello(self) -> None:
        """Say what is held, from any thread: the listening one does it once nothing waits to be applied."""
        self._hello_due = True
        self.spoke.wake()

    def _say_hello(self) -> None:
        self._hello_due = False
        self._session += 1
        self._answered, self._asked_at = False, monotonic()
        self._set_aside()
        self.spoke.send(self._hello().pack())

    def _hello(self) -> Hello:
        held, part = self._target.held, self._part
        digest = bytes.fromhex(self._layout.digest) if self._layout is not None else NOTHING
        b = part.begin if part is not None else None
        known = (
            (b.base, b.version, b.hash, len(part.data))
            if part is not None and b is not None
            else (0, 0, 0, 0)
        )
        above = max(self._target.above, held.number)
        return Hello(
            MAGIC, PROTOCOL, self._session, self.instance, digest, held.number, held.hash, above, *known
        )

    def _useful(self, part: PartialPatch | None) -> PartialPatch | None:
        """Return what came of a patch before the connection broke, if it still fits what is held."""
        if part is None or part.whole or not part.data:
            return None
        held = self._target.held
        starts = not part.begin.base or part.begin.base_hash == held.hash
        return part if starts and part.begin.version > held.number else None

    # the thread that listens

    def _listen(self) -> None:
        try:
            while not self._closing:
                event = self.spoke.recv(self._rest())
                if event is not None:
                    self._take(event)
                elif self._unanswered():  # less and less often: each HELLO is one more answer to wait for
                    self._patience, self._hello_due = min(2 * self._patience, LONGEST), True
                if self._hello_due and not self._pending and monotonic() >= self._hello_at:
                    self._say_hello()
        except Exception as e:
            if not (self._closing and isinstance(e, LinkError)):
                self._failed(e)
                self.spoke.close(0.0)
        finally:
            self._leave()

    def _unanswered(self) -> bool:
        """Return whether there was no answer for long enough to say HELLO again."""
        asked = self.spoke.joined and not (self._answered or self._hello_due)
        return asked and monotonic() - self._asked_at > self._patience

    def _rest(self) -> float:
        """Return the seconds to wait for news, at most."""
        left = self._hello_at - monotonic()
        return min(TURN, max(0.0, left)) if self._hello_due and left > 0 else TURN

    def _take(self, event: Event) -> None:
        if event.kind is EventKind.JOINED:
            self._hello_due, self._hello_at, self.reached = True, 0.0, True
            self._first, self._patience = self._session + 1, ANSWER
            self.current = self._heard = False
        elif event.kind is EventKind.LOST:
            self.current = self._heard = False
            self._set_aside()
        elif event.kind is EventKind.DATA:
            try:
                self._hear(protocol.unpack(event.data, DOWN))
            except TooLarge:  # and will be the next time
                raise
            except PayloadError as e:
                self._failure(e)
                self._leave()
                self._part, self._hello_due = None, True

    def _hear(self, message: Message) -> None:
        if isinstance(message, LayoutIs):
            self._answer(message)
        elif isinstance(message, Ask):
            if message.protocol != PROTOCOL:
                raise InputError(
                    f"{self.spoke.peer} speaks protocol {message.protocol}, this end {PROTOCOL}: install the "
                    "same thinwire at both"
                )
            self._hello_due, self._hello_at = True, self._asked_at + ASKED
        elif isinstance(message, Quiet):
            require(message.seconds >= 0, PayloadError, f"a publisher silent for {message.seconds} s")
            self._quiet_since = monotonic() - message.seconds if message.seconds else math.inf
        elif not self._answered:
            return  # of a connection or a session before
        elif isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Chunk):
            self._chunk(message)
        elif isinstance(message, End):
            self._end(message)
        elif isinstance(message, Abandon):
            if self._coming(message.transfer) is not None:
                self._leave()
                self.abandoned += 1
        elif isinstance(message, Same):
            self._same(message)

    def _answer(self, message: LayoutIs) -> None:
        late = message.session != self._session
        if late and not self._lacked(message):
            return
        name = bytes(message.name).rstrip(b"\0").decode(errors="replace")
        self._check_name(name)
        if message.instance != self.instance:
            self.restarts += self.instance != NOTHING
            self.instance = message.instance
        self._leave()
        self._received, self._answered = 0, not late
        self._heard = self._heard or not late
        self._patience = self._patience if late else ANSWER
        self._quiet_since = math.inf
        if self._layout is None or message.layout.hex() != self._layout.digest:
            if not len(message.json):
                self._layout = None  # so that HELLO does not claim to know it
                raise PayloadError("another layout, and it was left out")
            layout = Layout.from_json(message.json, self._max_nbytes)
            if layout.digest != message.layout.hex():
                raise PayloadError("a layout whose digest is another")
            self._target.agree(layout, name)
            self._layout, self._hello_due = layout, True

    def _lacked(self, message: LayoutIs) -> bool:
        """Return whether an answer to an earlier HELLO has the layout that is not known yet.

        Over a slow line it takes longer than one session lasts; the next HELLO says that it is known. What
        comes of a connection before this one may be of another publisher.
        """
        asked = self._first <= message.session <= self._session
        return asked and self._layout is None and len(message.json) > 0

    def _check_name(self, name: str) -> None:
        if self.name not in (None, name):
            raise InputError(
                f"{self.spoke.peer} publishes the state {name!r}, not {self.name!r}; "
                "follow another address, or give that name"
            )

    def _begin(self, begin: Begin) -> None:
        part, self._part = self._part, None
        self._leave()
        if self._layout is None:
            raise PayloadError("a patch before the layout")
        goes_on = part is not None and begin.start > 0 and part.continued_by(begin)
        here = part.data if part is not None and goes_on else Pages()
        self._partial = PartialPatch(begin, most(self._layout), here)
        self._todo.put(self._partial)

    def _set_aside(self) -> None:
        """Leave what is coming, and keep what came of it: the feed may go on there."""
        self._part = self._useful(self._partial or self._part)
        self._leave()

    def _leave(self) -> None:
        """Let go of what has not come whole."""
        partial, self._partial = self._partial, None
        if partial is not None:
            partial.drop()

    def _chunk(self, chunk: Chunk) -> None:
        self._received += len(chunk.data)
        self.spoke.send(Ack(self._session, self._received).pack())
        partial = self._coming(chunk.transfer)
        if partial is not None:
            partial.add(chunk)

    def _end(self, end: End) -> None:
        partial = self._coming(end.transfer)
        if partial is None:
            return
        with self._lock:  # it counts before it can have been applied
            partial.end(end)
            self._pending += 1
        self._partial = None

    def _coming(self, transfer: int) -> PartialPatch | None:
        """Return what is coming, None where that is another transfer: this one was given up."""
        partial = self._partial
        return partial if partial is not None and partial.begin.transfer == transfer else None

    def _same(self, message: Same) -> None:
        held = self._target.held
        if message.hash != held.hash or not message.version:
            return
        require(message.version < MAX_VERSION, PayloadError, f"version {message.version}")
        require(len(message.meta) <= MAX_META, PayloadError, f"meta data of {len(message.meta)} bytes")
        meta = load_meta(bytes(message.meta)) if len(message.meta) else held.meta
        require(is_time(message.published), PayloadError, f"a version published at {message.published:g}")
        version = Version(message.version, message.hash, message.published, meta)
        with suppress(DesyncError):  # a newer one has come meanwhile, or a number that is still too low
            known = self._target.confirm(version)
            self.current = True
            self._arrived(known, 0, 0.0)

    # the thread that applies

    def _work(self) -> None:
        try:
            while self._take_one():
                pass
        except Exception as e:
            self._failed(e)
            self.spoke.close(0.0)
            while self._todo.get() is not None:  # the listening thread must not wait for room
                pass

    def _take_one(self) -> bool:
        """Read and apply the next patch, and let go of it; return False in the end."""
        partial = self._next()
        if partial is None:
            return False
        reading = self._read(partial)
        try:
            if not partial.dropped:  # else its bytes may be another's by now, and whole
                self._answer_for(self._apply(partial, reading))
        finally:
            if reading is not None:
                reading.close()
        return True

    def _answer_for(self, answer: Message) -> None:
        if not self.spoke.send(answer.pack()) and self.spoke.joined:
            self._hello_due = True  # there was no room, and the feed waits for an answer
        with self._lock:
            self._pending -= 1
        if self._hello_due:
            self.spoke.wake()

    def _next(self) -> PartialPatch | None:
        """Return the next patch that comes, None in the end; while there is none, get ready for it."""
        while True:
            try:
                return self._todo.get(timeout=REST)
            except queue.Empty:
                self._target.prepare()

    def _read(self, partial: PartialPatch) -> SectionReading | None:
        """Read a patch until it is whole, or dropped; return what was read. Get ready for it in pauses."""
        begin = partial.begin
        reading = self._target.reading(begin.base_hash) if begin.base_hash or not begin.base else None
        sound, rested = reading is not None, -math.inf
        while not partial.ended:
            nbytes = len(partial.data)
            try:
                if reading is not None and sound:
                    reading.feed(partial.data)
            except PayloadError:
                sound = False  # once all is here the checksum tells whether the line or the sender is wrong
            if (
                begin.base and monotonic() - rested > REST
            ):  # while other threads read; a keyframe needs nothing
                self._target.prepare()
                rested = monotonic()
            partial.wait(nbytes, REST)
        return reading

    def _apply(self, partial: PartialPatch, reading: SectionReading | None) -> Message:
        begin, nbytes = partial.begin, len(partial.head) + len(partial.data)
        try:
            version = self._target.apply(partial.patch(), reading)
        except (PayloadError, DesyncError) as e:
            self._failure(e)
            held = self._target.held
            known = (held.number, held.hash) if self.failures < 2 else (0, 0)  # then from nothing
            return Again(self._session, begin.transfer, *known)
        self.failures, self.current = 0, self._heard  # else it came over a connection before
        self._arrived(version, nbytes, partial.seconds)
        return Done(self._session, begin.transfer, version.number, version.hash)

    def _failure(self, error: Exception) -> None:
        self.failures += 1
        if self.failures >= FAILURES:
            raise renewed(error)


class PartialPatch:
    """What is here of one transfer: bytes of a patch's body, at most ``limit``, and in the end its head.

    One thread adds bytes, ends it or drops it; another may wait for them. Errors: ``PayloadError``, and then
    it is of no more use.
    """

    def __init__(self, begin: Begin, limit: int, part: Pages | None = None) -> None:
        self.data = Pages() if part is None else part  # grows as bytes come: a claim costs nothing
        at = len(self.data)
        fits = begin.start == at
        require(fits, PayloadError, f"a patch that begins at byte {begin.start}, expected at {at}")
        self.begin, self._limit = begin, limit
        self.head = b""  # the patch's, which comes last
        self.dropped = False  # no more will come
        self.came = self._began = monotonic()  # when the newest bytes did
        self._news = threading.Condition()

    @property
    def whole(self) -> bool:
        return bool(self.head)

    @property
    def seconds(self) -> float:
        """How long the bytes took to come."""
        return self.came - self._began

    @property
    def ended(self) -> bool:
        return self.whole or self.dropped

    def drop(self) -> None:
        """Note that no more will come; nothing where all is here."""
        with self._news:
            self.dropped = self.dropped or not self.whole
            self._news.notify_all()

    def wait(self, nbytes: int, timeout: float) -> None:
        """Wait until more than ``nbytes`` are here, or it has ended; ``timeout`` in seconds."""
        with self._news:
            self._news.wait_for(lambda: self.ended or len(self.data) > nbytes, timeout)

    def add(self, chunk: Chunk) -> None:
        """Append a chunk, which must be the next one."""
        here, n = len(self.data), len(chunk.data)
        require(
            chunk.at == here and n > 0,
            PayloadError,
            f"{n} bytes of a patch at {chunk.at}, expected at {here}",
        )
        require(
            here + n <= self._limit, PayloadError, f"a patch of over {self._limit} bytes, too many for it"
        )
        self.data.add(chunk.data)
        with self._news:
            self.came = monotonic()
            self._news.notify_all()

    def end(self, end: End) -> None:
        """Take the head: all of the body is here."""
        here = len(self.data)
        fits = 0 < end.nbytes == here and 0 < len(end.head) <= MAX_HEAD
        require(fits, PayloadError, f"the end of a patch of {end.nbytes} bytes, of which {here} are here")
        with self._news:
            self.came, self.head = monotonic(), bytes(end.head)
            self._news.notify_all()

    def patch(self) -> Patch:
        """Return the patch, and let go of its bytes, which it has. Errors: ``PayloadError`` for none."""
        patch, told = Patch.join(self.head, self.data), self.begin.version
        self.data = Pages()
        as_told = _ends(patch) == _ends(self.begin)
        require(as_told, PayloadError, f"a patch to version {patch.version} announced as one to {told}")
        return patch

    def continued_by(self, begin: Begin) -> bool:
        """Return whether ``begin`` goes on with this patch after a new connection."""
        return _ends(begin) == _ends(self.begin) and begin.start == len(self.data)


def _ends(of: Begin | Patch) -> tuple[int, int, int, int]:
    return of.base, of.base_hash, of.version, of.hash
