"""What a rank does whose reference of a peer is no longer the peer's: it asks for the values themselves.

The peer answers from the thread that reads its link, at any time, and sends a keyframe next. It is asked for
one of its last exchanges: it cannot be far ahead of a rank whose messages it needs.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from weakref import WeakKeyDictionary, ref

from torch import Tensor

from thinwire.collectives import MeshExchange
from thinwire.links.mailbox import Mailbox
from thinwire.links.mesh import Peer
from thinwire.types import DesyncError, require
from thinwire.uses.pictures.context_parallel.ends import Ends, pack_whole

_STEP = struct.Struct("<Q")
_LEFT: WeakKeyDictionary[Mailbox, ref[Repairs]] = WeakKeyDictionary()  # their handlers keep them


@dataclass(frozen=True)
class Kept:
    """What a peer decodes a packet to, and the ends that coded it."""

    ends: Ends
    values: Tensor
    keys: Sequence[int]


class Repairs:
    """Ask the peers of an exchange, and answer those that ask.

    ``due``: how many exchanges of this rank a peer may not have decoded yet when the last of them is sent.
    """

    def __init__(self, exchange: MeshExchange, deadline: float, due: int = 1) -> None:
        self._peers, self._name, self._deadline = exchange.peers, exchange.name, deadline
        self._due = due
        self._kept: deque[tuple[int, Mapping[int, Kept]]] = deque(maxlen=due + 1)
        self._lock = Lock()
        for rank, peer in self._peers.items():
            peer.mailbox.on(self._tag("again"), partial(self._answer, rank, peer))

    def keep(self, step: int, kept: Mapping[int, Kept]) -> None:
        """Remember what is sent in an exchange, by rank, should a peer ask for it."""
        with self._lock:
            self._kept.append((step, kept))

    def ask(self, rank: int, step: int) -> bytes:
        """Return the packet of the values that a peer sent in an exchange. Errors: ``DesyncError``."""
        peer, place = self._peers[rank], _STEP.pack(step)
        peer.mailbox.send(self._tag("again") + place, b"")
        others = self._peers.values()
        data = peer.get(self._tag("whole") + place, self._deadline, "the values once more", others)
        require(bool(data), DesyncError, f"the references for rank {rank} are lost; begin the picture anew")
        return data

    def leave(self) -> None:
        """Keep what a peer may still ask for alone, and of one use of the mesh alone."""
        with self._lock:
            while len(self._kept) > self._due:
                self._kept.popleft()
        mailbox = next(iter(self._peers.values())).mailbox
        before = _LEFT.get(mailbox, lambda: None)()
        if before is not None:
            before.clear()
        _LEFT[mailbox] = ref(self)

    def clear(self) -> None:
        """Forget what was sent: the answer is now that there is none."""
        with self._lock:
            self._kept.clear()

    def _tag(self, kind: str) -> bytes:
        return f"{self._name}/{kind}/".encode()

    def _answer(self, rank: int, peer: Peer, tag: bytes, body: bytes) -> None:
        place = tag.removeprefix(self._tag("again"))
        with self._lock:
            found = [by_rank[rank] for step, by_rank in self._kept if _STEP.pack(step) == place]
            for kept in found:
                kept.ends.forget(kept.keys)
        data = pack_whole(found[0].values, found[0].keys) if found else b""
        peer.mailbox.send(self._tag("whole") + place, data)
