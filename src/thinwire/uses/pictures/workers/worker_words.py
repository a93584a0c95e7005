"""What a host and its workers say to each other before they are connected, in JSON: 4,096 bytes at most."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from thinwire.collectives.exchange import words_of
from thinwire.links.address import WORKER_PORT, Address
from thinwire.types import PayloadError, require

PROTOCOL = 1
MOST_TEXT = 400  # characters of a sentence that somebody else wrote
MOST_RANKS = 64
MOST_NOTES = 4096  # on the board of one mesh
DIFFUSERS = "diffusers"  # whose classes a model is of, unless told


class WorkerWord(StrEnum):
    """What a message is about."""

    BEGIN = "begin"  # the host: load this model, and be this rank
    READY = "ready"  # a worker: it is loaded
    REFUSED = "refused"  # a worker: why not
    CONNECT = "connect"  # the host: all are ready
    NOTE = "note"  # all: something for the board
    MET = "met"  # a worker: it is connected with all
    FAILED = "failed"  # a worker: why its call failed


@dataclass(frozen=True)
class WorkerJob:
    """What a host asks of a worker; ``reach``: by which name the worker is reached."""

    model: str
    kind: str  # the class
    dtype: str
    recipe: str
    mode: str | None
    rank: int
    world: int
    reach: str
    source: str = DIFFUSERS
    blocks: tuple[int, ...] = ()  # how many each rank has, where a rank has its own alone

    def pack(self) -> bytes:
        """Return the message that begins it."""
        return pack(WorkerWord.BEGIN, protocol=PROTOCOL, **asdict(self))

    @classmethod
    def of(cls, words: dict[str, Any]) -> WorkerJob:
        """Read one. Errors: ``PayloadError``, which the host is told."""
        theirs = words.get("protocol")
        text = (
            f"the worker speaks protocol {PROTOCOL}, not {ascii(theirs)[:40]}; take one version of thinwire"
        )
        require(theirs == PROTOCOL, PayloadError, text)
        texts = {name: words.get(name) for name in ("model", "kind", "dtype", "recipe", "reach", "source")}
        good = all(isinstance(x, str) and len(x) <= MOST_TEXT for x in texts.values())
        mode, rank, world, blocks = (words.get(name) for name in ("mode", "rank", "world", "blocks"))
        good = good and isinstance(rank, int) and isinstance(world, int) and 1 <= rank < world <= MOST_RANKS
        good = good and (mode is None or isinstance(mode, str)) and _are_shares(blocks, world)
        require(good, PayloadError, "what the host asks for cannot be read")
        return cls(mode=mode, rank=rank, world=world, blocks=tuple(blocks or ()), **texts)  # type: ignore[arg-type]  # all are checked


def _are_shares(blocks: Any, world: Any) -> bool:
    shares = isinstance(blocks, list) and len(blocks) in (0, world)
    return shares and all(isinstance(n, int) and n > 0 for n in blocks)


def pack(word: WorkerWord, **values: Any) -> bytes:
    """Return a message."""
    return json.dumps({"word": word, **values}).encode()


def unpack(data: bytes, sender: str) -> tuple[WorkerWord, dict[str, Any]]:
    """Return the word and the values of a message. Errors: ``PayloadError``."""
    words = words_of(data, sender)
    known = words.get("word") in tuple(WorkerWord)
    require(known, PayloadError, f"{sender} says {ascii(words.get('word'))[:40]}, which is no word")
    return WorkerWord(str(words.pop("word"))), words


def text_of(words: dict[str, Any]) -> str:
    """Return the sentence in a message, in one line."""
    return " ".join(str(words.get("text")).split())[:MOST_TEXT]


def address_of(text: str) -> Address:
    """Return the address of a worker, ``HOST`` or ``HOST:PORT``. Errors: ``InputError``."""
    return Address.parse(text, "the worker", like=WORKER_PORT, port=WORKER_PORT)


class MeetingBoard:
    """Where the ranks of one mesh leave their addresses: each has a copy, and tells the others of its notes.

    A store for ``connect_mesh``. ``tell`` is given this rank's own notes; ``tend`` reads what has come.
    """

    def __init__(self, tell: Callable[[str, str], object], tend: Callable[[], object]) -> None:
        self._tell, self._tend = tell, tend
        self._notes: dict[str, bytes] = {}

    def put(self, words: dict[str, Any]) -> tuple[str, str]:
        """Take the note of another rank. Errors: ``PayloadError``."""
        key, value = str(words.get("key")), str(words.get("value"))
        require(len(self._notes) < MOST_NOTES, PayloadError, "too many notes before the ranks are connected")
        self._notes[key] = value.encode()
        return key, value

    def set(self, key: str, value: str) -> None:
        """Leave a note, and tell the others."""
        self._notes[key] = value.encode()
        self._tell(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these notes are there."""
        self._tend()
        return all(key in self._notes for key in keys)

    def get(self, key: str) -> bytes:
        """Return a note. Errors: ``KeyError``."""
        return self._notes[key]
