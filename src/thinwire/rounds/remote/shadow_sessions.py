"""Machines that stand ready, at the server: each is sent the newest state whenever it holds another."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thinwire.links.hub.hub import Hub
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.remote.client_handshake import held_in
from thinwire.rounds.remote.control_messages import Sending, pack_words, whole
from thinwire.rounds.update_messages import Held

SIZE = 1 << 15  # bytes of a piece


@dataclass
class ShadowSession:
    """A machine that stands ready: what it holds, and what is under way to it."""

    held: Held | None
    down: Sending | None = None
    coming: Held | None = None


class ShadowSessions:
    """Let peers of ``hub`` follow ``server``; ``noted`` hears of each."""

    def __init__(self, server: Server, hub: Hub, noted: Callable[[str], object]) -> None:
        self._server, self._hub, self._noted = server, hub, noted
        self._sessions: dict[bytes, ShadowSession] = {}

    @property
    def peers(self) -> set[bytes]:
        """Who follows."""
        return set(self._sessions)

    def stand_by(self, peer: bytes, values: dict[str, Any]) -> None:
        """Let a peer follow the state, of which it holds some version, or none. Errors: ``PayloadError``."""
        held = held_in(values)
        if peer not in self._sessions:
            self._noted(f"{self._hub.describe(peer)} stands ready, and follows")
        self._sessions[peer] = ShadowSession(held)
        self._offer(peer)

    def has(self, peer: bytes, values: dict[str, Any]) -> None:
        """Note how much of a state is there. Errors: ``PayloadError``."""
        shadow = self._sessions[peer]
        if shadow.down is not None and whole(values, "number") == shadow.down.number:
            shadow.down.heard(whole(values, "have"))
            if shadow.down.done:
                shadow.held, shadow.down = shadow.coming, None
            self._offer(peer)

    def offer_all(self) -> None:
        """Go on with all, as far as there is room."""
        for peer in self._sessions:
            self._offer(peer)

    def left(self, peer: bytes) -> None:
        """Forget a peer that is gone."""
        self._sessions.pop(peer, None)

    def _offer(self, peer: bytes) -> None:
        """Begin to send the newest state, unless one is under way or there."""
        shadow, newest = self._sessions[peer], self._server.newest
        if shadow.down is None and shadow.held != newest:
            work = pack_words(json.dumps(self._server.words()))
            shadow.coming = newest
            shadow.down = Sending(newest.number + 1, self._server.lead(shadow.held, work).pack(), SIZE)
        if shadow.down is not None:
            shadow.down.send(lambda piece: self._hub.send(peer, piece))
