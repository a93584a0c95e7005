"""Why two ranks do not make the same calls: what the inputs of each were, by name, for a peer that asks."""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from threading import Lock

from thinwire.collectives import MeshExchange
from thinwire.collectives.framing import words_of
from thinwire.links.mesh import Peer
from thinwire.types import LinkError, PayloadError
from thinwire.uses.pictures.context_parallel.inputs import checksums
from thinwire.uses.pictures.context_parallel.weights import Weights

_WAIT = 5.0  # seconds for a cause that the error can do without
_WEIGHTS = " weights"  # no name of an input
_LATENTS = "hidden_states"
PROMPT = "prompt, seed and schedule"


class Inquiry:
    """The inputs of this rank's last calls, of which its messages carry one checksum.

    ``alike``: what of the inputs all ranks must have in common.
    """

    def __init__(self, exchange: MeshExchange, deadline: float, alike: str = PROMPT) -> None:
        self._peers, self._name, self._alike = exchange.peers, exchange.name, alike
        self._wait = min(deadline, _WAIT)
        self._weights: Weights | None = None
        self._calls: deque[tuple[str, dict[str, int]]] = deque(maxlen=4)
        self._generation, self._number = -1, 0
        self._lock = Lock()
        for peer in self._peers.values():
            peer.mailbox.on(self._tag("inputs"), partial(self._answer, peer))

    def watch(self, weights: Weights) -> None:
        """Count these weights among the inputs of each call."""
        self._weights = weights

    def note(self, generation: int, inputs: Mapping[str, object]) -> int:
        """Return a checksum of the inputs of a call, and remember those."""
        begins = generation != self._generation
        found = checksums(inputs)
        if self._weights is not None:
            found[_WEIGHTS] = self._weights.checksum(begins)
        self._generation, self._number = generation, 1 if begins else self._number + 1
        with self._lock:
            self._calls.append((f"{generation}.{self._number}", found))
        return zlib.crc32(json.dumps(found).encode())

    def cause(self, rank: int) -> str:
        """Return in a sentence what a peer, whose checksum is another, has otherwise."""
        told = f"rank {rank} called the model with other inputs; give all ranks one {self._alike}"
        call, own = self._calls[-1]
        theirs = self._asked(rank).get(call)
        if not isinstance(theirs, dict):
            return told
        names = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
        if _WEIGHTS in names:
            return f"rank {rank} now has other weights or adapters than this rank; change them alike on all"
        if names == [_LATENTS] and self._number > 1:
            return (
                f"rank {rank} has other {_LATENTS} in call {self._number} of the picture, not in the first: "
                "noise was drawn there; call torch.manual_seed with one seed on all ranks before the picture"
            )
        return f"{told} ({', '.join(names)} differ)" if names else told

    def _asked(self, rank: int) -> dict[str, object]:
        peer = self._peers[rank]
        with suppress(LinkError, PayloadError):
            peer.mailbox.send(self._tag("inputs"), b"")
            data = peer.mailbox.get(self._tag("said"), self._wait, "what its inputs are")
            return words_of(data, f"rank {rank}")
        return {}

    def _answer(self, peer: Peer, tag: bytes, body: bytes) -> None:
        with self._lock:
            peer.mailbox.send(self._tag("said"), json.dumps(dict(self._calls)).encode())

    def _tag(self, kind: str) -> bytes:
        return f"{self._name}/{kind}/".encode()
