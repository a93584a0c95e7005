"""Clients that are half of one each: who waits is brought together with the next one, at a relay."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, Self

from thinwire.links.hub.hub import Hub
from thinwire.links.relay.server import RelayServer
from thinwire.rounds.remote.client_handshake import Handshake
from thinwire.rounds.remote.control_messages import MOST_NAME, Word, pack, text, whole
from thinwire.types import InputError, PayloadError, require

NO_PAIRS = "this server takes whole models alone; join without --stages 2"
NO_TOKEN = "pairs meet at a relay, which needs a token; start server and members with --token-file"
START = 20.0  # seconds
LAST = 65535


class Pairing(NamedTuple):
    """Where a half meets the other one: ``place`` is a name at the relay on the server's ``port``.

    ``stage``: 0 speaks for both, under ``name``.
    """

    stage: int
    port: int
    place: str
    name: str

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """Read one, as it came in a message. Errors: ``PayloadError``."""
        stage, port, place = whole(values, "stage"), whole(values, "port"), text(values, "place")
        good = stage < 2 and 0 < port <= LAST and place.isalnum()
        require(good, PayloadError, f"a pair is to meet at {place[:40]!r}, port {port}, as stage {stage}")
        return cls(stage, port, place, text(values, "name")[:MOST_NAME])


class Matchmaker:
    """Bring clients of ``hub`` together that ask for another half; ``relay`` returns the port of a relay.

    They came through ``handshake`` before.
    """

    def __init__(
        self,
        hub: Hub,
        handshake: Handshake,
        relay: Callable[[], int] | None,
        noted: Callable[[str], object],
    ) -> None:
        self._hub, self._handshake, self._relay, self._noted = hub, handshake, relay, noted
        self._waiting: dict[bytes, tuple[str, int | None]] = {}  # names, and which half they have been

    def ask(self, peer: bytes, values: dict[str, Any]) -> None:
        """Let a client wait, or meet the one that waits; turn it away where nobody can, and say why."""
        try:
            been = whole(values, "been") if values.get("been") is not None else None
            name, port = self._handshake.name_of(peer), self._port()
        except (PayloadError, InputError) as e:
            self._handshake.turn_away(peer, str(e))
            return
        self._waiting[peer] = name, been
        if len(self._waiting) < 2:
            self._noted(f"{name} waits for another half")
            return
        # who has been a half before is that half again, where it can
        (one, (first, of_one)), (two, (second, of_two)) = self._waiting.items()
        if of_one == 1 or (of_one is None and of_two == 0):
            one, first, two, second = two, second, one, first
        self._waiting.clear()
        place, both = secrets.token_hex(8), f"{first}+{second}"[:MOST_NAME]
        for stage, half in enumerate((one, two)):
            self._hub.send(half, pack(Word.PAIR, **Pairing(stage, port, place, both)._asdict()))
        self._noted(f"{first} and {second} are one pair")

    def _port(self) -> int:
        if self._relay is None:
            raise InputError(NO_PAIRS)
        return self._relay()

    def left(self, peer: bytes) -> None:
        """Forget a client that is gone."""
        self._waiting.pop(peer, None)


class PairRelay:
    """A relay on a thread of this process, from the first pair on; for holders of ``token``."""

    def __init__(self, host: str, port: int, token: bytes | None) -> None:
        self._at, self._token = (host, port), token
        self._stop: Callable[[], object] | None = None
        self._started: Future[int] | None = None

    def port(self) -> int:
        """Return where it listens. Errors: ``InputError`` without a token, or for a port that is taken."""
        require(self._token is not None, InputError, NO_TOKEN)
        if self._started is None:
            self._started = Future()
            threading.Thread(target=self._run, args=(self._started,), name="relay", daemon=True).start()
        try:
            return self._started.result(START)
        except Exception as e:
            self._started = None  # the port may be free by the time of the next pair
            why = str(e) or f"it did not begin within {START:g} s"
            raise e if isinstance(e, InputError) else InputError(f"pairs have no relay here: {why}") from e

    def close(self) -> None:
        """Pass on no more."""
        if self._stop is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._stop()

    def _run(self, started: Future[int]) -> None:
        async def serve() -> None:
            loop, stop = asyncio.get_running_loop(), asyncio.Event()
            self._stop = lambda: loop.call_soon_threadsafe(stop.set)
            await RelayServer(self._token or b"").serve(*self._at, stop, started.set_result)

        try:
            asyncio.run(serve())
        except BaseException as e:
            if not started.done():
                started.set_exception(e)
