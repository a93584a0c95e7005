"""A server on a port: clients come, are given versions, leave in the middle of it, and come back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from thinwire.links.hub.hub import Hub
from thinwire.links.hub.station import Event, EventKind
from thinwire.rounds.aggregation_server import Accepted, Rejected, Server
from thinwire.rounds.client_profile import ClientProfile
from thinwire.rounds.client_scheduler import ASKED_AGAIN, ClientScheduler, MadeVersion
from thinwire.rounds.parameters import most_nbytes
from thinwire.rounds.remote.branch import Branch
from thinwire.rounds.remote.client_handshake import (
    PROBE_SIZE,
    PROBES,
    ClientHello,
    ClientSession,
    Handshake,
    differs,
    pace_in,
    paces_differ,
)
from thinwire.rounds.remote.control_messages import (
    STATE,
    TICK,
    MessagePiece,
    Receiving,
    Sending,
    Word,
    pack,
    text,
    values_of,
    whole,
    word_of,
)
from thinwire.rounds.remote.matchmaking import Matchmaker
from thinwire.rounds.remote.shadow_sessions import ShadowSessions
from thinwire.rounds.update_messages import HEAD, MOST_ROOM, Held
from thinwire.types import InputError, LinkError, PayloadError, require

SIZE = 1 << 15  # bytes of a piece to a client
LOOK = 1.0  # seconds
AWAY = 60.0  # seconds for which a model is kept that somebody fetches who went away
WAKE = 0.01  # seconds after which a branch looks for a version from above
SILENT = "no update came"  # in what is said of those who did not answer in time
GRACE = 5.0  # seconds for those that are gone to come back, once all others have answered
FAREWELL = 60.0  # seconds for the last word to reach all clients, behind what is under way to them
ROOM = HEAD.size + MOST_ROOM  # bytes of an update beside its packet
FEW = 2  # versions that a client may have missed to get them within a round


class RemoteServer:
    """Run ``server`` at ``hub``, for clients that are told ``terms``; ``made`` hears of each version.

    It begins when ``expected`` clients are there, or ``gather`` seconds have passed and one is. A round, or
    without rounds the wait for any update, lasts ``deadline`` seconds at most. A client that is cut off has
    that long to come back; its update goes on from where it was. A client that does not answer in time is
    left out of the next version, then of three, of seven. Once a share ``quorum`` of a round has answered,
    the others have as long again as that took. ``noted`` hears of clients that come and go.
    Devices are as clients and probes measure them, and assignments are made again where these change.

    ``paced``: returns the longest that the coming round may last; then ``deadline`` only bounds the wait for
    anybody at all, and who holds no version, or one from long ago, fetches the newest before it takes part:
    no round lasts longer for it. ``issued`` is called once the versions of a round are out, to do what nobody
    waits for, and returns whether to go on. ``seen`` hears of each client that comes, and
    that goes. ``admits``, ``kit``: as for ``Handshake``. ``asked_again``: how often a round that nobody
    answered is repeated. ``above``: says when a round begins, where that is not for this server to say.
    ``relay``: returns the port of a relay, where clients that are half of one each are to meet.

    Errors: ``LinkError`` where nobody comes, or nobody answers; it names the clients.
    """

    def __init__(
        self,
        server: Server,
        hub: Hub,
        terms: Mapping[str, Any],
        made: Callable[[MadeVersion], bool],
        *,
        expected: int = 1,
        participate: int = 0,
        seed: int = 0,
        gather: float = 300.0,
        deadline: float = 600.0,
        quorum: float = 1.0,
        noted: Callable[[str], object] = lambda text: None,
        seen: Callable[[int, bool], object] = lambda client, here: None,
        paced: Callable[[], float] | None = None,
        issued: Callable[[], bool] = lambda: True,
        admits: Callable[[str], str] = lambda name: "",
        kit: bytes = b"",
        asked_again: int = ASKED_AGAIN,
        above: Branch | None = None,
        relay: Callable[[], int] | None = None,
    ) -> None:
        self.server, self._hub, self._made = server, hub, made
        self._seen, self._paced, self._issued, self._above = seen, paced, issued, above
        require(0 < quorum <= 1, InputError, f"quorum={quorum} is no share; give one above 0, up to 1")
        self._expected, self._gather, self._deadline = expected, gather, deadline
        self._quorum = quorum
        self._noted = noted
        self._sessions: dict[int, ClientSession] = {}
        self._handshake = Handshake(
            hub, terms, self._sessions, server.names, noted, server.signature, admits, kit
        )
        self._halves = Matchmaker(hub, self._handshake, relay, noted)
        self._conductor = ClientScheduler(
            server,
            self._here,
            self._issue,
            self._tell,
            lambda: self.now,
            seed,
            participate,
            asked_again=asked_again,
        )
        self.tally = self._conductor.tally
        self._alone: float | None = None  # since when only those are missing that are gone, monotonic
        self._reasons: dict[int, str] = {}  # why updates did not count in full, last
        self._shadows = ShadowSessions(server, hub, noted)
        self._began: float | None = None
        self._is_made = False  # a version, since ``issued`` was called
        self._due = self._look = (
            math.inf
        )  # when the round or the period ends, and to look after all, monotonic
        self._round_began = 0.0  # monotonic
        self.round_seconds = self._wait = deadline  # the longest that this round, and its updates, may take
        self._answered = self._closing = 0.0  # when all had answered, monotonic; what a version took then
        self._heard = 0.0  # when an update came last, monotonic
        self.ended: dict[int, Held] = {}  # what clients held that heard that it is over

    @property
    def now(self) -> float:
        """Seconds since the first client was given a version; 0 before."""
        return time.monotonic() - self._began if self._began is not None else 0.0

    @property
    def kit_bytes(self) -> int:
        """Bytes sent of what the model is made of."""
        return self._handshake.kit_bytes

    def run(self) -> None:
        """Gather clients, go on until ``made`` says so, and tell all that it is over."""
        self._await_clients()
        self._began = self._heard = self._look = time.monotonic()
        self._due = self._began + (self.server.rule.seconds or self._deadline)
        self._conductor.start(self._present())
        while self._conductor.going:
            self._turn()
            if self._conductor.going and self._is_made:
                self._is_made, began = False, time.monotonic()
                self._conductor.going = self._issued()
                self._extend(time.monotonic() - began)
        self._say_goodbye()

    def _extend(self, seconds: float) -> None:
        """Let the round last so much longer: nobody was heard meanwhile."""
        if self._paced is not None:
            self._due += seconds
            self.round_seconds += seconds

    def _say_goodbye(self) -> None:
        """Tell all that it is over, and wait until they heard it: what a closing socket holds is lost."""
        left, end = set[bytes](), time.monotonic() + FAREWELL
        for peer in (
            {session.peer for session in self._sessions.values()} & set(self._hub.peers)
            | self._handshake.waiting
            | self._shadows.peers
        ):
            if self._hub.send(peer, pack(Word.DONE, version=self.server.version)):
                left.add(peer)
        while left and time.monotonic() < end:
            event = self._hub.recv(TICK)
            if event is None:
                left &= set(self._hub.peers)
            elif event.kind is EventKind.LOST or event.data[:1] == bytes([Word.DONE]):
                left.discard(event.peer)
                self._part(event)
            elif event.kind is EventKind.JOINED:
                self._hub.send(event.peer, pack(Word.DONE, version=self.server.version))
                left.add(event.peer)

    def _part(self, event: Event) -> None:
        """Note what a client holds that says goodbye."""
        session = self._session_of(event.peer)
        if session is not None and event.kind is EventKind.DATA and len(event.data) > 1:
            with suppress(PayloadError):
                values = values_of(event.data)
                self.ended[session.client] = Held(whole(values, "number"), whole(values, "check"))

    def _await_clients(self) -> None:
        end = time.monotonic() + self._gather
        while len(self._present()) < self._expected:
            if time.monotonic() > end and (self._present() or not self._is_anybody_fetching()):
                here = self._present()
                missing = sorted(set(range(self._expected)) - set(here))
                who = ", ".join(map(str, missing[:8]))
                many = f"of {self._expected} clients {len(here)} came within {self._gather:g} s"
                require(bool(here), LinkError, f"{many}; start them, or give fewer as --clients")
                self._noted(f"{many}, not {who}; it begins with those")
                return
            self._turn()

    # -- turns ---------------------------------------------------------------------------------------------

    def _present(self) -> list[int]:
        """Return who can take part: all who are there but those that fetch what they need for it."""
        return sorted(c for c, s in self._sessions.items() if s.there and s.coming is None)

    def _here(self) -> list[int]:
        """Return who is there for a round; where nobody is, wait for somebody to come back."""
        end = time.monotonic() + self._deadline
        while time.monotonic() < end or self._is_anybody_fetching():
            self._catch_up()
            if self._present():
                if self._above is None or self._above.ready():
                    break
                end = time.monotonic() + self._deadline
            if self._above is not None and self._above.is_over():
                self._conductor.going = False
                break
            self._listen(TICK if self._above is None else WAKE)
        self._round_began, self._alone = time.monotonic(), None
        self.round_seconds = self._paced() if self._paced is not None else self._deadline
        self._wait = max(self.round_seconds - self._closing, self.round_seconds / 2)
        self._due = self._round_began + self._wait
        return self._present()

    def _issue(self, client: int) -> None:
        """Give a client the newest version."""
        session = self._sessions[client]
        left = max(1e-3, self._due - time.monotonic()) if math.isfinite(self._due) else 0.0
        version = self.server.issue(client, session.held, session.after)
        session.version, session.fetched = replace(version, seconds=left), False
        self.tally.issued(session.version, client)
        session.down, session.up = Sending(session.sequence, session.version.pack(), SIZE), None
        session.moved = time.monotonic()
        self._pump(session)

    def _tell(self, made: MadeVersion) -> bool:
        if self._paced is not None:
            self._closing = time.monotonic() - self._answered
        self._name_untrusted()
        self._is_made = True
        going = self._made(made)
        self._shadows.offer_all()
        if not self.server.rule.seconds:
            self._due = time.monotonic() + self._deadline
        return going

    # -- clients that do not take part yet -----------------------------------------------------------------

    def _is_behind(self, session: ClientSession) -> bool:
        """Say whether a client is to fetch the newest version before a round, so that none waits for it."""
        known = self._above is None or self.server.version > 0  # a branch may have nothing yet
        behind = self.server.behind(session.held)
        return self._paced is not None and known and (behind is None or behind > FEW)

    def _catch_up(self) -> None:
        """Send the newest version to those who were not asked for long; no round is open."""
        for session in list(self._sessions.values()):
            waits = session.there and session.coming is None and not session.fetched
            if waits and self._is_behind(session):
                self._send_ahead(session)

    def _is_anybody_fetching(self) -> bool:
        since = time.monotonic() - self._deadline
        return any(s.there and s.coming is not None and s.moved > since for s in self._sessions.values())

    def _send_ahead(self, session: ClientSession, partial: int = 0, have: int = 0) -> None:
        """Send a client the newest version beside the rounds; of ``partial`` it has ``have`` bytes."""
        session.coming = session.coming or self.server.newest  # it is not asked from here on
        asked, held = session.version is not None, session.held
        if asked:
            session.end_turn()
            session.held = held  # it said so itself
        if session.ahead is None or session.ahead.number != partial:
            session.coming, lead = self.server.newest, self.server.lead(session.held)
            session.ahead = Sending(STATE + lead.number, lead.pack(), SIZE)
            self.server.traffic(session.client).raw_down += 4 * self.server.weights.numel()
        session.ahead.restart(have if partial == session.ahead.number else 0)
        self._pump(session)
        if asked:  # last: a round that ends by it may wait for this very client
            self._answered = time.monotonic()
            self._conductor.lost(session.client, leaves=True)
        else:
            self.server.leave(session.client)

    def _came_ahead(self, session: ClientSession) -> None:
        """Let a client take part that has what it was sent; or go on, where what it missed is far less."""
        took = session.ahead.nbytes if session.ahead is not None else 0
        session.held, session.coming, session.ahead = session.coming, None, None
        if self._is_behind(session) and 2 * self.server.lead(session.held).nbytes < took:
            self._send_ahead(session)
            return
        session.fetched = True
        self._join(session, session.device)
        if self._began is not None:
            self._conductor.joined(session.client)

    def _name_untrusted(self) -> None:
        """Say whose updates did not count in the version just made, or not in full, and tell the former."""
        for client, verdict in sorted(self.server.verdicts.items()):
            new, self._reasons[client] = self._reasons.get(client) != verdict.reason, verdict.reason
            if new and verdict.reason and verdict.trust > 0:
                self._noted(f"{self._called(client)} counts {verdict.trust:.2f}: {verdict.reason}")
            elif new and verdict.reason:
                self._refuse(client, verdict.reason)
                session = self._sessions.get(client)
                if session is not None and session.there:
                    told = pack(Word.RECEIPT, number=session.after, reason=verdict.reason)
                    self._hub.send(session.peer, told)

    def _pump(self, session: ClientSession) -> None:
        if session.down is not None:
            session.down.send(lambda piece: self._hub.send(session.peer, piece))
        if session.ahead is not None:
            session.ahead.send(lambda piece: self._hub.send(session.peer, piece))

    def _turn(self) -> None:
        """Let one thing happen: what a client says, or the end of a time."""
        self._listen(max(0.0, min(TICK, self._due - time.monotonic())))
        if self._conductor.going and time.monotonic() >= self._due:
            self._time_is_up()

    def _listen(self, seconds: float) -> None:
        """Wait so long for something to happen; look after what found no room."""
        event = self._hub.recv(seconds)
        if event is not None:
            self._handle(event)
        if self._conductor.going and time.monotonic() >= self._look:
            self._look = time.monotonic() + LOOK
            self._look_after()

    def _look_after(self) -> None:
        """Go on with what found no room, and without those of whom nothing has come for too long."""
        self._shorten()
        self._handshake.pump_all()
        self._shadows.offer_all()
        for client, session in list(self._sessions.items()):
            self._pump(session)
            stood = time.monotonic() - session.moved
            if stood > self._deadline and session.version is not None:
                self._give_up(client)
            if stood > min(AWAY, self._deadline) and not session.there:
                session.ahead = None  # who comes back after so long begins anew

    def _shorten(self) -> None:
        """Wait only a moment longer in a round for which all have answered but those that are gone."""
        missing = self.server.missing
        gone = missing and not any(self._sessions[c].there for c in missing)
        if self._paced is None or not gone or not self.server.answers[0]:
            self._alone = None
            return
        self._alone = self._alone or time.monotonic()
        self._due = min(self._due, self._alone + GRACE)

    def _time_is_up(self) -> None:
        now, rule = time.monotonic(), self.server.rule
        require(rule.in_rounds or now - self._heard <= self._deadline, LinkError, self._silent())
        if rule.seconds:
            self._due = max(self._due + rule.seconds, now)
            self._conductor.end_period()
            return
        self._due = now + self.round_seconds if rule.in_rounds else self._heard + self._deadline
        if not rule.in_rounds:
            return
        for client in self.server.missing:
            if client in self.server.missing:  # giving one up may have ended the round
                self._give_up(client)

    def _silent(self) -> str:
        who = ", ".join(map(str, sorted(self._sessions)[:8]))
        return f"no update came for {self._deadline:g} s, of clients {who}; see what they say"

    def _give_up(self, client: int) -> None:
        session, waited = self._sessions[client], time.monotonic() - self._round_began
        longest = self._wait if self.server.rule.in_rounds else self._deadline
        why = f"{SILENT} within {longest:.3g} s"
        if self._alone is not None:
            why = f"it went away, and {SILENT} within {waited:.3g} s"
        elif self.server.rule.in_rounds and waited < longest:
            why = f"{SILENT} within {waited:.1f} s, and {self._quorum:.0%} of the round had answered"
        self._refuse(client, why)
        self._hub.send(session.peer, pack(Word.RECEIPT, number=session.sequence, reason=why))
        session.end_turn()
        self._answered = time.monotonic()
        self._conductor.late(client, leaves=not session.there)

    def _refuse(self, client: int, why: str) -> None:
        self.tally.refuse(self.now, Rejected(client, why))
        self._noted(f"{self._called(client)}: {why}")

    # -- what clients say ----------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        session = self._session_of(event.peer)
        if event.kind is EventKind.LOST:
            self._lost(event.peer, event.data.decode(errors="replace"))
        elif event.kind is EventKind.JOINED and session is not None and not session.there:
            self._hub.send(event.peer, pack(Word.HELLO))  # it may not know that it was lost
        elif event.kind is EventKind.DATA:
            try:
                self._hear(event.peer, event.data, event.at)
            except PayloadError as e:
                session = self._session_of(event.peer)
                if session is not None:
                    self._refuse(session.client, str(e))
                else:
                    self._noted(f"{self._hub.describe(event.peer)} said {e}")

    def _hear(self, peer: bytes, data: bytes, at: float) -> None:
        word = word_of(data)
        if word is Word.PROBE:
            self._handshake.probe(peer, len(data), at)
        elif word is Word.ASK:
            self._handshake.answer(peer, values_of(data))
        elif word is Word.HELLO:
            self._welcome(peer, values_of(data))
        elif word is Word.SHADOW:
            self._shadows.stand_by(peer, values_of(data))
        elif word is Word.HAVE and peer in self._shadows.peers:
            self._shadows.has(peer, values_of(data))
        elif word is Word.PAIR:
            self._halves.ask(peer, values_of(data))
        elif word is Word.KIT:
            self._handshake.send_kit(peer, values_of(data))
        elif word is Word.HAVE and self._session_of(peer) is None:
            self._handshake.pump(peer, whole(values_of(data), "have"))
        else:
            session = self._session_of(peer)
            if session is not None and session.there:  # what comes before a hello, or from others, is void
                self._hear_client(session, word, data, at)

    def _hear_client(self, session: ClientSession, word: Word, data: bytes, at: float) -> None:
        if word in (Word.PIECE, Word.HAVE):
            session.moved = at
        if word is Word.PIECE:
            self._take(session, MessagePiece.unpack(data), at)
        elif word is Word.HAVE:
            self._has(session, values_of(data))
        elif word is Word.SPEED:
            self._note_speed(session, replace(session.device, **pace_in(values_of(data))._asdict()))
        elif word is Word.FAILED:
            self._failed(session, text(values_of(data), "text"))

    def _has(self, session: ClientSession, values: dict[str, Any]) -> None:
        """Note how much of what is under way to a client is there."""
        number, have = whole(values, "number"), whole(values, "have")
        if session.down is not None and number == session.down.number:
            session.down.heard(have)
        elif session.ahead is not None and number == session.ahead.number:
            self.server.traffic(session.client).down += session.ahead.heard(have)
            if session.ahead.done:
                self._came_ahead(session)
                return
        self._pump(session)

    def _welcome(self, peer: bytes, values: dict[str, Any]) -> None:
        """Let a client in, and go on with what was under way; turn others away, and say why."""
        try:
            hello = self._handshake.admit(peer, values)
        except PayloadError as e:
            self._handshake.turn_away(peer, str(e))
            client = values.get("client")
            if isinstance(client, int):
                self.tally.refuse(self.now, Rejected(client, str(e)))
            return
        self._enter(peer, hello)

    def _enter(self, peer: bytes, hello: ClientHello) -> None:
        known = self._sessions.get(hello.client)
        came = known is None or not known.there
        session = self._sessions[hello.client] = known or ClientSession(hello.client, peer, hello.device)
        session.peer, session.there, session.held, session.after = peer, True, hello.held, hello.after
        session.moved = time.monotonic()
        behind = self._is_behind(session) and not hello.goes_on(session)
        fetched = session.coming is not None and not behind
        if not behind:
            session.coming = session.ahead = None
        if came or fetched:
            self._join(session, hello.device)
        if came:
            self._noted(f"{self._called(hello.client)} is here, {hello.device.samples} samples")
            self._seen(hello.client, True)
        if behind:
            self._hub.send(peer, pack(Word.WELCOME, number=0, have=0))
            self._send_ahead(session, hello.partial, hello.have)
            return
        self._resume(session, hello)
        if (came or fetched) and session.version is None and self._began is not None:
            self._conductor.joined(session.client)

    def _join(self, session: ClientSession, device: ClientProfile) -> None:
        session.device = device
        self.server.join(device)
        if session.coming is not None:
            self.server.leave(session.client)  # it does not take part yet

    def _resume(self, session: ClientSession, hello: ClientHello) -> None:
        """Go on with a turn where the client stands, or give it anew; else let it wait, or begin."""
        due, have = session.sequence, session.up.have if session.up is not None else 0
        if session.up is not None:
            session.up.broke()
        wanted = due > 0 and hello.trained == due
        self._hub.send(session.peer, pack(Word.WELCOME, number=due if wanted else 0, have=have))
        if due and not wanted:
            if hello.partial == due and session.down is not None:
                session.down.restart(hello.have)
                self._pump(session)
            else:
                self._issue(session.client)

    def _take(self, session: ClientSession, piece: MessagePiece, at: float) -> None:
        """Take a piece of an update; say how much is here, or what became of it."""
        if not session.sequence or piece.number != session.sequence:
            return  # of no turn, or one that was given up; the client is told by its next version
        self._answered = time.monotonic()
        most = most_nbytes(self.server.weights.numel()) + ROOM
        if piece.total > most:
            self._ended(
                session, Rejected(session.client, f"an update of {piece.total} bytes, and {most} may be")
            )
            return
        if session.up is None:
            session.up = Receiving(piece.number, piece.total)
        done = session.up.take(piece, at)
        session.up.acknowledge(at, lambda said: self._hub.send(session.peer, said))
        if done:
            self._update(session, session.up)

    def _update(self, session: ClientSession, up: Receiving) -> None:
        if up.rate is not None and up.total > PROBES * PROBE_SIZE:
            self._note_speed(session, replace(session.device, up=up.rate))
        version = session.version
        found = self.server.receive(session.client, up.data)
        if isinstance(found, Accepted) and version is not None:
            self._heard = time.monotonic()
            session.after = version.sequence
        self._ended(session, found)

    def _ended(self, session: ClientSession, found: Accepted | Rejected) -> None:
        """End a client's turn, and tell it."""
        number, reason = session.sequence, found.reason if isinstance(found, Rejected) else ""
        session.end_turn()
        if reason:
            self._noted(f"{self._called(session.client)}: {reason}")
        self._hub.send(session.peer, pack(Word.RECEIPT, number=number, reason=reason))
        self._conductor.came(session.client, found)
        answered, asked = self.server.answers
        if self._conductor.going and self._quorum < 1 and answered >= self._quorum * asked > 0:
            now = time.monotonic()
            self._due = min(self._due, 2 * now - self._round_began)

    def _note_speed(self, session: ClientSession, device: ClientProfile) -> None:
        """Choose again for a device whose speed has changed."""
        known = session.device
        if differs(known.up, device.up) or paces_differ(known.pace, device.pace):
            self._join(session, device)

    def _failed(self, session: ClientSession, why: str) -> None:
        self._refuse(session.client, why)
        self._went(session)
        if session.version is not None:
            session.end_turn()
            self._answered = time.monotonic()
            self._conductor.lost(session.client, leaves=True)

    def _lost(self, peer: bytes, why: str) -> None:
        self._handshake.left(peer)
        self._halves.left(peer)
        self._shadows.left(peer)
        session = self._session_of(peer)
        if session is not None and session.there:
            self._noted(f"{self._called(session.client)} is gone: {why}")
            self._went(session)

    def _went(self, session: ClientSession) -> None:
        if session.there:
            self._seen(session.client, False)
        session.there = False
        if session.version is None:
            self._conductor.left(session.client)
            self.server.leave(session.client)

    def _called(self, client: int) -> str:
        session = self._sessions.get(client)
        name = session.device.name if session is not None else self.server.names().get(client, "")
        return f"{name} (client {client})" if name else f"client {client}"

    def _session_of(self, peer: bytes) -> ClientSession | None:
        return next((session for session in self._sessions.values() if session.peer == peer), None)
