"""How two ranks find each other through a store: the higher one asks, the lower one answers with its address.

Each question has a word of its own, and each answer is under its question's word. So nobody reads what an
earlier mesh, a run that failed or a process that was started again has left in the store.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from thinwire.types import WRONG_VALUES, InputError, LinkError, require

_LIFE = secrets.token_hex(8)  # of this process; a copy made by fork has the number of another
_met: Counter[str] = Counter()  # meshes that this process has made, by key
_answered: set[str] = set()  # words of the questions that it has answered
_UNMET = (RuntimeError, TimeoutError, KeyError)  # how stores say that there is nothing, or that they are gone


class RendezvousStore(Protocol):
    """What is needed of a ``torch.distributed`` store."""

    def set(self, key: str, value: str) -> None:
        """Publish a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it up to the store's own timeout."""
        ...


class Meeting:
    """The pairs of ``rank`` at a store, under ``prefix``: higher ranks are told where it is, lower asked.

    A store without torch's ``check`` is asked by ``get``, which waits. Errors of all: ``LinkError`` where the
    store does not answer.
    """

    def __init__(self, store: RendezvousStore | None, prefix: str, rank: int) -> None:
        self._store: Any = store  # which ``check`` finds to be one
        self._prefix, self._rank = prefix, rank
        self._check: Any = getattr(store, "check", None)
        self._told: dict[int, tuple[str, dict[str, str]]] = {}  # the address, and for which meshes of whom
        self._asked: dict[int, str] = {}  # the word of each question to a lower rank

    def check(self) -> None:
        """Raise ``InputError`` where there is no store."""
        require(
            self._store is not None,
            InputError,
            "without a relay the ranks meet at a store; pass one to connect_mesh",
        )

    def listen(self, other: int, host: str, port: int, name: str) -> None:
        """Let ``answer`` tell the higher rank ``other`` that address."""
        self._told[other] = json.dumps([host, port, name]), {}

    def answer(self, others: Iterable[int]) -> None:
        """Tell those of ``others`` that have asked for this mesh where this rank listens.

        What a process that was told asks for its next mesh is left to this rank's next one.
        """
        for other in self._told.keys() & set(others):
            word = self._look(self._key(self._rank, other))
            if word and word not in _answered:
                self._tell(word, self._key(self._rank, other, word), *self._told[other])

    def _tell(self, word: str, key: str, told: str, meshes: dict[str, str]) -> None:
        if self._check is not None and self._exists(key):
            return  # by an earlier process of this rank
        life, _, rest = word.partition("/")
        mesh = rest.partition("/")[0]
        if meshes.setdefault(life, mesh) == mesh:
            _answered.add(word)
            self._set(key, told)

    def ask(self, other: int) -> None:
        """Ask the lower rank ``other`` where it listens."""
        key = self._key(other, self._rank)
        self._asked[other] = f"{_LIFE}-{os.getpid()}/{_met[key]}/{secrets.token_hex(8)}"
        self._set(key, self._asked[other])

    def address(self, other: int) -> tuple[str, int, str] | None:
        """Return the host, port and name that the lower rank ``other`` has answered; None before.

        Errors: ``InputError`` where another process is this rank under the same prefix.
        """
        word, key = self._asked[other], self._key(other, self._rank)
        found = self._look(self._key(other, self._rank, word))
        if found is None:
            require(
                self._look(key) in (None, word),
                InputError,
                f"another process came as rank {self._rank} to the mesh {self._prefix!r} of this store; give "
                "each process a rank of its own, and meshes that are made at the same time another prefix",
            )
            return None
        try:
            host, port, name = json.loads(found)
            return str(host), int(port), str(name)
        except WRONG_VALUES as e:
            raise LinkError(f"the address that rank {other} published cannot be read") from e

    def met(self) -> None:
        """Note that the mesh is made: the next question is for another one."""
        _met.update(self._key(other, self._rank) for other in self._asked)

    def _key(self, low: int, high: int, word: str = "ask") -> str:
        return f"{self._prefix}/{low}-{high}/{word}"

    def _set(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except _UNMET as e:
            raise _gone(e) from e

    def _exists(self, key: str) -> bool:
        try:
            return bool(self._check([key]))
        except _UNMET as e:
            raise _gone(e) from e

    def _look(self, key: str) -> str | None:
        """Return a value, or None where there is none, or none came while the store waited."""
        if self._check is not None and not self._exists(key):
            return None
        try:
            return bytes(self._store.get(key)).decode(errors="replace")
        except _UNMET as e:
            if self._check is None:
                return None
            raise _gone(e) from e


def _gone(error: Exception) -> LinkError:
    why = str(error).partition("\n")[0][:200]
    return LinkError(f"the store where the ranks meet does not answer ({why}); see whether its holder runs")
