"""A client of a server elsewhere: it dials in, trains what it is given, and goes on after a break."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from thinwire.links.hub.spoke import Spoke
from thinwire.links.hub.station import Event, EventKind
from thinwire.rounds.client import Client, PauseError
from thinwire.rounds.client_profile import ClientPace
from thinwire.rounds.parameters import Signature, most_nbytes
from thinwire.rounds.remote.client_handshake import PROBE_SIZE, PROBES, paces_differ
from thinwire.rounds.remote.control_messages import (
    MOST,
    MOST_TEXT,
    PROTOCOL,
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
from thinwire.rounds.remote.matchmaking import Pairing
from thinwire.rounds.update_messages import VersionMessage
from thinwire.types import DesyncError, InputError, LinkError, PayloadError, require

SIZE = MOST - 100  # bytes of a piece to a server
ROOM = 1 << 12  # bytes of a version beside its packets and its work
MOST_WORK = 1 << 26  # bytes of the work in a version
FLUSH = 5.0  # seconds for the last word to leave
TRIES = 3


class ServerEvents:
    """What happens on a ``spoke``, until there is no sign of the server for ``patience`` seconds.

    ``remedy``: what to do then.
    """

    def __init__(self, spoke: Spoke, patience: float, remedy: str) -> None:
        self._spoke, self._patience, self._remedy = spoke, patience, remedy
        self._heard = time.monotonic()

    def next(self, end: float = math.inf, what: str = "") -> Event:
        """Return the next thing that happens. Errors: ``LinkError`` naming the server after the silence.

        Not before ``end``, monotonic seconds, ``LinkError`` that says ``what`` did not come.
        """
        while True:
            event = self._spoke.recv(TICK)
            self._heard = max(self._heard, self._spoke.heard)
            if event is not None:
                return event
            require(time.monotonic() < end, LinkError, what)
            quiet = time.monotonic() - self._heard
            if quiet >= self._patience:
                who = f"{self._spoke.peer}{self._spoke.tried}"
                raise LinkError(f"no sign of {who} for {quiet:.0f} s; {self._remedy}")


class RemoteClient:
    """Talk to the server that ``spoke`` dials; give up after ``patience`` seconds without a sign of it.

    ``noted`` hears of breaks and refusals. ``name``: what this client is called, here and when it comes back.
    Errors: ``LinkError`` naming the server, ``InputError`` where it
    does not let this client take part, and why.
    """

    def __init__(
        self,
        spoke: Spoke,
        patience: float = 300.0,
        noted: Callable[[str], object] = lambda text: None,
        name: str = "",
    ) -> None:
        self._spoke, self._noted, self._name = spoke, noted, name
        self._next = ServerEvents(spoke, patience, "see whether the server runs there").next
        self._probe = Receiving(0, PROBES * PROBE_SIZE)
        self._client: Client | None = None
        self._signature: Signature | None = None  # of the server's model
        self._pace = ClientPace(0.0)
        self._down: Receiving | None = None
        self._up: Sending | None = None
        self._trained = 0  # the sequence number of the version that came last, whole
        self.turns = 0
        self._again = 0  # versions in a row that could not be followed
        self._paused: Callable[[], bool] | None = None  # says whether it can take part again

    def terms(self, client: int | None = None) -> dict[str, Any]:
        """Ask what is to be done, as the client of this number, or of any; measure the way to the server."""
        asked = False
        while True:
            event = self._next()
            if event.kind is EventKind.JOINED:
                self._spoke.send(pack(Word.ASK, protocol=PROTOCOL, client=client, name=self._name))
                asked = True
            elif event.kind is EventKind.DATA and asked:
                word = word_of(event.data)
                self._check_refused(word, event.data)
                if word is Word.TERMS:
                    values = values_of(event.data)
                    self._signature = Signature.read(values.get("signature"))
                    self._time_the_way()
                    return values
                require(word is not Word.DONE, LinkError, f"{self._spoke.peer} has its last version already")

    def kit(self, nbytes: int) -> bytes:
        """Return what the server's model is made of, ``nbytes``; it goes on where a connection broke."""
        kit = Receiving(0, nbytes)
        if nbytes:
            self._spoke.send(pack(Word.KIT, have=0))
        while kit.have < nbytes:
            event = self._next()
            if event.kind is EventKind.JOINED:
                self._spoke.send(pack(Word.KIT, have=kit.have))
            elif event.kind is EventKind.DATA and word_of(event.data) is Word.PIECE:
                piece = MessagePiece.unpack(event.data)
                if piece.number == kit.number:
                    kit.take(piece, event.at)
                    kit.acknowledge(event.at, self._spoke.send)
        return kit.data

    def pair(self, been: int | None, patience: float) -> Pairing | int:
        """Wait for another half; ``been``: which half this one was before.

        Return where they meet, of which the first speaks for both; or the number of the last version.
        Errors: ``LinkError`` where none comes within ``patience`` seconds.
        """
        end = time.monotonic() + patience
        what = f"no other half came to {self._spoke.peer} for {patience:g} s; start one more"
        self._spoke.send(pack(Word.PAIR, been=been))
        asked = True
        while True:
            event = self._next(end, what)
            if event.kind is EventKind.JOINED:  # a new connection is nobody yet
                self._spoke.send(pack(Word.ASK, protocol=PROTOCOL, client=None, name=self._name))
                asked = False
                continue
            word = word_of(event.data) if event.kind is EventKind.DATA else None
            if word is Word.TERMS and not asked:
                self._spoke.send(pack(Word.PAIR, been=been))
                asked = True
            elif word is Word.PAIR:
                found = Pairing.read(values_of(event.data))
                self._name = found.name or self._name
                return found
            elif word is Word.DONE:
                self._spoke.send(pack(Word.DONE))
                return whole(values_of(event.data), "version")
            elif word is not None:
                self._check_refused(word, event.data)

    def serve(self, client: Client, pace: ClientPace) -> int:
        """Train what comes until the server says that it is over; return the number of the last version.

        ``pace``: as measured. Errors: ``TrainingError``, which the server is told;
        ``InputError`` where the server's model is another.
        """
        client.signature.check(self._signature, f"the model of {self._spoke.peer}")
        self._client, self._pace = client, pace
        self._say_hello()
        while True:
            event = self._next() if self._paused is None else self._pausing(self._paused)
            if event is None:
                continue
            if event.kind is EventKind.JOINED:
                self._say_hello()
            elif event.kind is EventKind.LOST:
                self._noted(f"lost {self._spoke.peer}: {event.data.decode(errors='replace')}; dialling again")
            else:
                word = word_of(event.data)
                if word is Word.DONE:
                    last = whole(values_of(event.data), "version")
                    client.end(last)
                    held = client.held._asdict() if client.held is not None else {}
                    self._spoke.send(pack(Word.DONE, **held))
                    return last
                self._hear(word, event.data, event.at)

    def _pausing(self, ready: Callable[[], bool]) -> Event | None:
        """Return what is said while this client cannot take part; say so once it can."""
        event = self._spoke.recv(TICK)
        if event is None and ready():
            self._paused = None
            self._say_hello()
        return event

    def close(self) -> None:
        """Leave: another one speaks for this client."""
        self._spoke.close(FLUSH)

    # -- what the server says ------------------------------------------------------------------------------

    def _hear(self, word: Word, data: bytes, at: float) -> None:
        self._check_refused(word, data)
        if word is Word.PIECE:
            self._take(MessagePiece.unpack(data), at)
            return
        if word is Word.HELLO:
            self._say_hello()
            return
        if word not in (Word.WELCOME, Word.HAVE, Word.RECEIPT):
            return
        values = values_of(data)
        number = whole(values, "number")
        if word is Word.RECEIPT:
            if self._up is not None and self._up.number == number:
                self._up = None
            reason = text(values, "reason")
            if reason:
                self._noted(f"update {number} was refused: {reason}")
        elif self._up is not None and number == self._up.number:
            if word is Word.WELCOME:
                self._up.restart(whole(values, "have"))
            else:
                self._up.heard(whole(values, "have"))
            self._up.send(self._spoke.send)
        elif word is Word.WELCOME:
            self._up = None  # nobody waits for it; what it held goes with the next one

    def _check_refused(self, word: Word, data: bytes) -> None:
        if word is Word.REFUSED:
            raise InputError(f"{self._spoke.peer}: {text(values_of(data), 'text')}")

    def _take(self, piece: MessagePiece, at: float) -> None:
        """Take a piece of a version; answer once it is whole."""
        if self._client is None or piece.number <= self._trained:
            return
        known = self._down is not None and self._down.number == piece.number
        if self._down is None or not known or self._down.total != piece.total:
            most = most_nbytes(self._client.values) + ROOM + MOST_WORK
            wrong = f"{self._spoke.peer} sends a version of {piece.total} bytes, and {most} may be"
            require(piece.total <= most, PayloadError, wrong)
            self._down = Receiving(piece.number, piece.total)
        whole_now = self._down.take(piece, at)
        self._down.acknowledge(at, self._spoke.send)
        if whole_now:
            data, self._down = self._down.data, None
            if piece.number >= STATE:
                self._follow(self._client, data)
            else:
                self._trained = piece.number
                self._answer(self._client, data)

    def _follow(self, client: Client, data: bytes) -> None:
        """Hold a version that came before this client takes part."""
        try:
            client.follow(VersionMessage.unpack(data))
            self._again = 0
        except (PayloadError, DesyncError) as e:
            self._ask_again(e)

    def _ask_again(self, e: Exception) -> None:
        """Say that what came could not be followed: nothing is held now, and the next one comes whole."""
        self._again += 1
        require(self._again < TRIES, PayloadError, f"{TRIES} versions in a row could not be read: {e}")
        self._noted(f"a version could not be followed: {e}")
        self._trained = 0
        self._say_hello()

    def _answer(self, client: Client, data: bytes) -> None:
        """Train a version, and begin to send the update."""
        try:
            version = VersionMessage.unpack(data)
            began = time.monotonic()
            update = client.train(version)
        except (PayloadError, DesyncError) as e:
            self._ask_again(e)
            return
        except PauseError as e:
            self._spoke.send(pack(Word.FAILED, text=str(e)[:MOST_TEXT]))
            self._paused = e.ready
            return
        except Exception as e:
            self._spoke.send(pack(Word.FAILED, text=str(e)[:MOST_TEXT]))
            self._spoke.close(FLUSH)
            raise
        self.turns, self._again = self.turns + 1, 0
        self._note_pace(client.pace(time.monotonic() - began, update.steps))
        self._up = Sending(update.sequence, update.pack(), SIZE)
        self._up.send(self._spoke.send)

    # -- what this client says -----------------------------------------------------------------------------

    def _say_hello(self) -> None:
        client, down = self._client, self._down
        if client is None:
            return
        if down is not None:
            down.broke()
        self._spoke.send(
            pack(
                Word.HELLO,
                client=client.id,
                name=self._name,
                signature=list(client.signature),
                samples=client.most_samples,
                **self._pace._asdict(),
                down=self._probe.rate,
                delay=max(1e-6, (self._spoke.clock.trip or 0.0) / 2),
                held=list(client.held) if client.held is not None else None,
                after=client.sequence,
                trained=self._trained,
                partial=down.number if down is not None else 0,
                have=down.have if down is not None else 0,
            )
        )

    def _note_pace(self, pace: ClientPace) -> None:
        if paces_differ(pace, self._pace):
            self._pace = pace
            self._spoke.send(pack(Word.SPEED, **pace._asdict()))

    def _time_the_way(self) -> None:
        """Send messages that the server times, and time those that it sends back."""
        for _ in range(PROBES):
            self._spoke.send(bytes([Word.PROBE]) + bytes(PROBE_SIZE - 1))
        done = False
        while not done:
            event = self._next()
            if event.kind is not EventKind.DATA:
                return  # the connection broke: what is known is enough to begin
            if word_of(event.data) is Word.PROBE:
                data = memoryview(event.data)
                piece = MessagePiece(0, self._probe.have, self._probe.total, data)
                done = self._probe.take(piece, event.at)
