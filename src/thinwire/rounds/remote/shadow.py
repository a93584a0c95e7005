"""A second machine that stands ready: it follows a server's state, version by version, in few bytes."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from thinwire.links.hub.spoke import Spoke
from thinwire.links.hub.station import Event, EventKind
from thinwire.rounds.model_copy import ModelCopy
from thinwire.rounds.parameters import most_nbytes
from thinwire.rounds.remote.control_messages import (
    MessagePiece,
    Receiving,
    Word,
    pack,
    values_of,
    whole,
    word_of,
)
from thinwire.rounds.update_messages import VersionMessage
from thinwire.types import WRONG_VALUES, DesyncError, LinkError, PayloadError, require

TICK = 0.1  # seconds
MOST_WORDS = 1 << 28  # bytes of what a server knows of its clients and samples


class Shadow:
    """Follow the state of the server that ``spoke`` dials; give up after ``patience`` seconds without a sign.

    ``values``: parameters of the model. ``kept`` hears of each version: its number, what clients hold of it
    [1, N], and what the server knows, as ``Server.words`` has it.
    """

    def __init__(
        self,
        spoke: Spoke,
        values: int,
        kept: Callable[[int, Tensor, Mapping[str, Any]], object],
        patience: float = 300.0,
    ) -> None:
        self._spoke, self._kept, self._patience = spoke, kept, patience
        self._copy, self._most = ModelCopy(values), most_nbytes(values) + MOST_WORDS
        self._coming: Receiving | None = None
        self._heard = time.monotonic()

    def run(self) -> int:
        """Follow until the server says that it is over; return its last version's number.

        Errors: ``LinkError`` naming the server, once it is silent.
        """
        self._ask()
        while True:
            event = self._next()
            if event.kind is EventKind.JOINED:
                self._ask()
            elif event.kind is EventKind.DATA:
                word = word_of(event.data)
                if word is Word.DONE:
                    self._spoke.send(pack(Word.DONE))
                    return whole(values_of(event.data), "version")
                if word is Word.PIECE:
                    self._take(MessagePiece.unpack(event.data), event.at)

    def _ask(self) -> None:
        self._coming, held = None, self._copy.held
        self._spoke.send(pack(Word.SHADOW, held=list(held) if held is not None else None))

    def _next(self) -> Event:
        while True:
            event = self._spoke.recv(TICK)
            self._heard = max(self._heard, self._spoke.heard)
            if event is not None:
                return event
            quiet = time.monotonic() - self._heard
            if quiet >= self._patience:
                raise LinkError(f"no sign of {self._spoke.peer} for {quiet:.0f} s; take over, or see there")

    def _take(self, piece: MessagePiece, at: float) -> None:
        if self._coming is None or self._coming.number != piece.number or self._coming.total != piece.total:
            wrong = f"{self._spoke.peer} sends a state of {piece.total} bytes, and {self._most} may be"
            require(piece.total <= self._most, PayloadError, wrong)
            self._coming = Receiving(piece.number, piece.total)
        done = self._coming.take(piece, at)
        self._coming.acknowledge(at, self._spoke.send)
        if done:
            data, self._coming = self._coming.data, None
            self._keep(data)

    def _keep(self, data: bytes) -> None:
        try:
            version = VersionMessage.unpack(data)
            row, words = self._copy.take(version), unpack_words(version.work)
        except (PayloadError, DesyncError):
            self._ask()  # holds nothing now: the next one comes whole
            return
        self._kept(version.number, row, words)


def pack_words(text: str) -> bytes:
    """Return what a server knows as the work of a version."""
    return zlib.compress(text.encode(), 6)


def unpack_words(data: bytes | memoryview) -> dict[str, Any]:
    """Read what ``pack_words`` wrote. Errors: ``PayloadError``."""
    opened = zlib.decompressobj()
    try:
        text = opened.decompress(bytes(data), MOST_WORDS)
        require(opened.eof, PayloadError, "what the server knows is cut, or too long")
        words = json.loads(text)
    except (*WRONG_VALUES, zlib.error) as e:
        raise PayloadError("what the server knows cannot be read") from e
    require(isinstance(words, dict), PayloadError, "what the server knows has no names")
    return dict(words)
