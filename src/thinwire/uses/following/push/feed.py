"""A feed: serve one history to many followers over a hub, each at its own speed."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic

from thinwire.links.hub.hub import Hub
from thinwire.links.hub.station import Event, EventKind
from thinwire.links.inbox import renewed
from thinwire.state.history import History
from thinwire.state.patches.draft import Draft
from thinwire.state.patches.patch import Version, dump_meta
from thinwire.types import InputError, LinkError, PayloadError, require
from thinwire.uses.following.push import protocol
from thinwire.uses.following.push.draft_maker import DraftMaker
from thinwire.uses.following.push.protocol import (
    MAGIC,
    MAX_NAME,
    PROTOCOL,
    UP,
    Ack,
    Again,
    Ask,
    Done,
    Hello,
    LayoutIs,
    Message,
    Quiet,
    Same,
)
from thinwire.uses.following.push.send_schedule import CHECK_SHARE, Order, SendSchedule, Transfer

TURN = 1.0  # seconds
UNGREETED = 3.0  # seconds, some round trips, after which who is there and has said nothing is asked for HELLO
SILENT = 3.0  # seconds, a few pings, after which followers hear that the publisher above gives no sign
MOVES = 64  # times that followers may have the newest version numbered anew at once; one more each second
BURST = 256  # events taken before the followers are served
PARKED = 8  # transfers that broke off and are kept for their follower to come back
PARKED_FOR = 600.0  # seconds
HIGHEST = 1 << 48  # no follower moves the numbers of versions above this


@dataclass(frozen=True)
class FollowerStatus:
    """What a feed knows of one follower: bytes are of the wire, ``rate`` in bytes/s, ``rtt`` in seconds."""

    name: str
    version: int
    sent: int
    rate: float | None
    rtt: float | None
    delivered: int  # transfers applied
    abandoned: int
    greeted: bool = True  # it has said what it holds, and has the layout


@dataclass
class _FollowerState:
    session: int
    claim: tuple[int, int] = (0, 0)  # version and hash that it said it holds
    told: bool = False  # whether it holds what is offered: it was told, or it does not
    schedule: SendSchedule = field(default_factory=SendSchedule)
    order: tuple[Order, Future[Draft]] | None = None
    used: tuple[int, int] = (0, 0)  # the version that it will hold, and the one it holds


class Feed:
    """Send a history's newest version to whoever follows; ``wake`` it after each publication.

    ``outnumber`` is called with the newest version number that a follower knows of: versions must be counted
    on from there (a relay passes it up instead). ``quiet``: seconds without a sign of whoever publishes what
    a relay passes on; followers are told. ``later``: what the history begins with is not offered before the
    first ``wake``. The feed owns the hub.
    """

    def __init__(
        self,
        history: History,
        hub: Hub,
        name: str = "state",
        outnumber: Callable[[int], object] | None = None,
        instance: bytes | None = None,
        quiet: Callable[[], float] = lambda: 0.0,
        later: bool = False,
    ) -> None:
        check_name(name)
        self._history, self._hub, self._name = history, hub, name.encode()
        self._outnumber = outnumber or history.outnumber
        self.instance = instance or secrets.token_bytes(16)
        self._json = history.layout.to_json()
        self._digest = bytes.fromhex(history.layout.digest)
        self._maker = DraftMaker(history, self._stir)
        self._followers: dict[bytes, _FollowerState] = {}
        self._ungreeted: dict[bytes, float] = {}  # who is there and has said nothing, since when
        self._moves, self._moved_at = float(MOVES), monotonic()
        self._parked: OrderedDict[Draft, float] = OrderedDict()
        self._closing = self._news = False
        self._offers = not later
        self._quiet, self._tell_at, self._told = quiet, 0.0, 0.0
        self._compare_at = 0.0  # when a patch may be made next only to compare its size
        self._error: Exception | None = None
        history.keep(self._in_use)
        self._thread = threading.Thread(target=self._run, name=f"feed at port {hub.port}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look at the history again: there is a newer version."""
        self._offers = True
        self._stir()

    def _stir(self) -> None:
        self._news = True
        self._hub.wake()

    @property
    def newest(self) -> Version:
        """The newest version that followers are offered; number 0 for none."""
        return self._history.newest if self._offers else Version()

    def check(self) -> None:
        """Raise what ended the feed, if anything did."""
        if self._error is not None:
            raise renewed(self._error)

    @property
    def followers(self) -> list[FollowerStatus]:
        """Who follows now, and how far each is."""
        found = []
        for peer, follower in list(self._followers.items()):
            s, sent = follower.schedule, self._hub.traffic(peer)[0].nbytes
            known = (s.pace.rate, s.pace.trip, s.delivered, s.abandoned, s.greeted)
            found.append(FollowerStatus(self._hub.describe(peer), s.held, sent, *known))
        return found

    @property
    def sent(self) -> int:
        """Wire bytes sent to all followers there ever were."""
        return self._hub.traffic()[0].nbytes

    def close(self) -> None:
        """Stop serving; followers notice, and come back to whoever listens at the port next."""
        self._closing = True
        self._hub.close()
        self._thread.join(10.0)
        self._maker.close()
        self._history.release(self._in_use)

    def _in_use(self) -> list[int]:
        """Return the versions that patches will start from, those that are coming before those that are held.

        Patches that are under way, or parked, count.
        """
        used = [follower.used for follower in list(self._followers.values())]
        drafts, trial = self._maker.drafts()
        coming = [number for number, _ in used] + [draft.version for draft in drafts]
        held = [held for _, held in used] + [draft.base for draft in drafts]
        return coming + held + [number for draft in trial for number in (draft.version, draft.base)]

    # the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except LinkError as e:
            if not self._closing:
                self._error = e
        except Exception as e:
            self._error = e
            self._hub.close(0.0)

    def _turn(self) -> None:
        touched: set[bytes] = set()
        timeout = TURN
        for _ in range(BURST):
            event = self._hub.recv(timeout)
            if event is None:
                break
            self._take(event)
            touched.add(event.peer)
            timeout = 0.0
        self._maker.check()
        self._tell_quiet(monotonic())
        self._ask(monotonic())
        if self._news or not touched:
            self._news, touched = False, set(self._followers)
        for peer in touched:
            if peer in self._followers:
                self._serve(peer, self._followers[peer])

    def _tell_quiet(self, now: float) -> None:
        """Tell followers, now and then, how long the publisher above is silent, and once when it is back."""
        if now < self._tell_at:
            return
        seconds, self._tell_at = self._quiet(), now + TURN
        seconds = seconds if seconds > SILENT else 0.0
        if seconds or self._told:
            for peer in self._followers:
                self._hub.send(peer, Quiet(seconds).pack())
        self._told = seconds

    def _ask(self, now: float) -> None:
        """Ask whoever is there, and does not say so, for HELLO.

        A connection may outlive the silence for which this end gave up the follower. That one has noticed
        nothing, and says nothing while nothing comes; over a new connection it says HELLO by itself.
        """
        for peer in [peer for peer, since in self._ungreeted.items() if now - since >= UNGREETED]:
            del self._ungreeted[peer]
            self._hub.send(peer, Ask(PROTOCOL).pack())

    def _take(self, event: Event) -> None:
        if event.kind is EventKind.JOINED:
            self._ungreeted[event.peer] = monotonic()
        elif event.kind is EventKind.LOST:
            self._ungreeted.pop(event.peer, None)
            self._part(self._followers.pop(event.peer, None))
        elif event.kind is EventKind.DATA:
            try:
                self._hear(event.peer, protocol.unpack(event.data, UP))
            except LinkError:  # the hub's own
                raise
            except Exception:  # whoever speaks so is not to be served; it may begin again, others go on
                self._part(self._followers.pop(event.peer, None))

    def _hear(self, peer: bytes, message: Message) -> None:
        now = monotonic()
        self._ungreeted.pop(peer, None)  # whatever it says, it is answered
        if isinstance(message, Hello):
            self._greet(peer, message, now)
            return
        follower = self._followers.get(peer)
        if follower is None:
            self._hub.send(peer, Ask(PROTOCOL).pack())
        elif not isinstance(message, Ack | Done | Again) or message.session != follower.session:
            return  # said before the follower's last HELLO was answered
        elif isinstance(message, Ack):
            follower.schedule.pace.acked(message.received, now)
        elif isinstance(message, Done):
            follower.schedule.done(message.transfer, message.version, message.hash)
        else:
            follower.claim = message.version, message.hash
            follower.schedule.again(message.transfer, self._known(*follower.claim))

    def _known(self, version: int, content: int) -> int:
        """Return the number by which this history knows what a follower holds; 0 where it does not."""
        return self._history.find(version, content) if content else 0

    def _greet(self, peer: bytes, hello: Hello, now: float) -> None:
        if hello.magic != MAGIC or hello.protocol != PROTOCOL:
            self._hub.send(peer, Ask(PROTOCOL).pack())
            return
        self._part(self._followers.get(peer))
        self._count_on(hello)
        newest, known = self.newest, hello.layout == self._digest
        self._hub.send(peer, self._layout(hello.session, newest.number, known).pack())
        follower = self._followers[peer] = _FollowerState(hello.session)
        if not known:
            return  # it greets again once it has looked at the layout
        follower.claim = hello.version, hello.hash
        held = self._known(*follower.claim)
        follower.schedule.hello(held, self._resumed(hello), now, hello.version)
        self._tell_same(peer, follower)

    def _tell_same(self, peer: bytes, follower: _FollowerState) -> None:
        """Tell a follower where it holds what is offered; nothing before anything is."""
        offers, newest, held = self._offers, self.newest, follower.schedule.held
        follower.told = offers and held <= newest.number  # else it holds what is about to be the newest
        if held and held == newest.number:
            meta = dump_meta(newest.meta)
            self._hub.send(peer, Same(held, newest.hash, newest.published, meta).pack())

    def _count_on(self, hello: Hello) -> None:
        """Number the newest version above what a follower has seen: it takes nothing that looks older."""
        newest = self._history.newest
        taken = hello.version == newest.number and hello.hash != newest.hash
        above = max(hello.above, hello.version)
        honest = above < HIGHEST or above <= newest.number
        require(honest, PayloadError, f"a follower that has seen version {above}; at most {HIGHEST} is one")
        if newest.number < above or (taken and newest.number):
            now = monotonic()
            self._moves = min(MOVES, self._moves + now - self._moved_at)
            self._moved_at = now
            if self._moves < 1:  # it says HELLO again later: whoever only wants numbers moved gets few
                raise PayloadError("too many followers that have seen newer versions")
            self._moves -= 1
            self._outnumber(above)

    def _layout(self, session: int, newest: int, known: bool) -> LayoutIs:
        json = b"" if known else self._json
        name = self._name.ljust(MAX_NAME, b"\0")
        return LayoutIs(PROTOCOL, session, self.instance, self._digest, newest, name, memoryview(json))

    def _resumed(self, hello: Hello) -> tuple[Draft, int] | None:
        """Return the draft that a follower has a part of, if it is still of use to it."""
        draft = self._maker.kept(hello.part_base, hello.part_version, hello.part_hash)
        right = hello.instance == self.instance and draft is not None
        if draft is None or not right or not 0 < hello.part <= draft.nbytes:
            return None
        starts = not draft.base or draft.base_hash == hello.hash
        return (draft, hello.part) if starts and draft.version > hello.version else None

    def _part(self, follower: _FollowerState | None) -> None:
        """Keep what was being sent to a follower for a while: it may come back with the first part of it.

        Also what was sent to its end: the last of it may still have been on its way.
        """
        for draft in follower.schedule.under_way if follower is not None else ():
            self._parked[draft] = monotonic() + PARKED_FOR
            self._parked.move_to_end(draft)
        while len(self._parked) > PARKED:
            self._parked.popitem(last=False)

    def _serve(self, peer: bytes, follower: _FollowerState) -> None:
        schedule, now, newest = (
            follower.schedule,
            monotonic(),
            self.newest.number,
        )  # before what is known of it
        while self._parked and next(iter(self._parked.values())) < now:
            self._parked.popitem(last=False)
        if follower.order is not None and follower.order[1].done():
            order, made = follower.order
            follower.order = None
            schedule.made(order, made.result(), now)
        if not schedule.expected and follower.order is None and (held := self._known(*follower.claim)):
            schedule.held = held  # a base from elsewhere, which was published since
            follower.told = False
        if not follower.told:
            self._tell_same(peer, follower)
        schedule.messages(now, lambda message: self._hub.send(peer, *message.parts()))
        if follower.order is None:
            seconds, lead = self._maker.seconds, self._maker.lead
            compare = now >= self._compare_at and self._comparable(schedule.sending)
            wanted = schedule.order(newest, now, seconds, compare, lead)
            if wanted is not None:
                if wanted.compare:  # all followers together get this share of a core
                    self._compare_at = now + seconds / CHECK_SHARE
                follower.order = wanted, self._maker.start(wanted)
        follower.used = (schedule.expected, schedule.held)

    def _comparable(self, sending: Transfer | None) -> bool:
        """Return whether there can be a fresh patch from where this one starts; else it were a keyframe."""
        draft = sending.draft if sending is not None else None
        return draft is not None and self._known(draft.base, draft.base_hash) == draft.base > 0


def check_name(name: str) -> None:
    """Raise ``InputError`` for a state's name that no message has room for."""
    require(len(name.encode()) <= MAX_NAME, InputError, f"the name {name!r} is over {MAX_NAME} bytes")
