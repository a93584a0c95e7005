"""A second machine that stands ready: it follows a server's state, version by version, in few bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from thinwire.links.hub.spoke import Spoke
from thinwire.links.hub.station import EventKind
from thinwire.rounds.model_copy import ModelCopy
from thinwire.rounds.parameters import most_nbytes
from thinwire.rounds.remote.control_messages import (
    MOST_WORDS,
    MessagePiece,
    Receiving,
    Word,
    pack,
    unpack_words,
    values_of,
    whole,
    word_of,
)
from thinwire.rounds.remote.remote_client import ServerEvents
from thinwire.rounds.update_messages import VersionMessage
from thinwire.types import DesyncError, PayloadError, require


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
        self._spoke, self._kept = spoke, kept
        self._next = ServerEvents(spoke, patience, "take over, or see there").next
        self._copy, self._most = ModelCopy(values), most_nbytes(values) + MOST_WORDS
        self._coming: Receiving | None = None

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
