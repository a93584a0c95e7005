"""Messages to a set of peers by step, over the mesh: what both kinds of exchange send and wait with."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from thinwire.links.inbox import pending, renewed
from thinwire.links.link import Data
from thinwire.links.mesh import LOOK, Peer, StallDeadline, get_all
from thinwire.links.pair.reliable import PIECE
from thinwire.types import InputError, LinkError, require

LABEL = "exchange"  # the traffic class for the meters
_STEP = struct.Struct("<Q")


class Posts:
    """Send to ``ranks`` of the mesh, and wait for them. ``name`` tells several exchanges of a mesh apart.

    So does their order, where some of the same ranks have one name.
    """

    def __init__(self, rank: int, peers: Mapping[int, Peer], ranks: Iterable[int] | None, name: str) -> None:
        self.rank, self.name = rank, name
        self.ranks = tuple(sorted({rank, *(peers if ranks is None else ranks)}))
        for r in self.ranks:
            require(
                r in (rank, *peers), InputError, f"rank {r} is not in the mesh of rank {rank}; connect it"
            )
        self.peers = {r: peers[r] for r in self.ranks if r != rank}
        taken = {peer.mailbox.claim(name) for peer in self.peers.values()}
        wrong = (
            f"some of the ranks {self.ranks} have an exchange {name!r} already; give this one another name"
        )
        require(len(taken) < 2, InputError, wrong)
        self.key = next(iter(taken), name)  # what the tags begin with
        self._sender = ThreadPoolExecutor(1, f"exchange {name!r}")
        self._unacknowledged: dict[Future[None], Peer] = {}
        self._closed = False

    def tag(self, kind: str, step: int) -> bytes:
        """Return the mailbox's tag of a message."""
        return self.prefix(kind) + _STEP.pack(step)

    def prefix(self, kind: str) -> bytes:
        """Return what the tags of one kind begin with."""
        return f"{self.key}/{kind}/".encode()

    def step(self, tag: bytes) -> int:
        """Return the step of a tag."""
        return int(_STEP.unpack(tag[-_STEP.size :])[0])

    def send(self, peer: Peer, kind: str, step: int, body: Data) -> None:
        """Queue one message; ``body`` stays as it is until the peer has it."""
        require(not self._closed, LinkError, f"the exchange {self.name!r} is closed")
        if peer.mailbox.error is not None:
            raise renewed(peer.mailbox.error)
        done = pending()
        self._unacknowledged[done] = peer
        if len(body) <= PIECE:
            self._hand_over(done, peer, self.tag(kind, step), body)
        else:  # copying and its check sums take a while
            self._sender.submit(self._hand_over, done, peer, self.tag(kind, step), body)

    def get(
        self,
        ranks: Iterable[int],
        kind: str,
        step: int,
        deadline: float,
        what: str,
        final: Callable[[bytes], bool] | None = None,
    ) -> dict[int, bytes]:
        """Return the next message of a kind for a step from each of some peers, by rank; see ``get_all``."""
        awaited = {rank: self.peers[rank] for rank in ranks}
        return get_all(awaited, self.tag(kind, step), deadline, what, self.peers.values(), final)

    def wait(
        self, future: Future[Any], awaited: Callable[[], Iterable[Peer]], deadline: float, what: str
    ) -> None:
        """Wait for a future that ``awaited`` peers bring about; it may have failed.

        Errors: ``LinkError`` of an awaited peer that is lost, or that names it after ``deadline`` seconds in
        which nothing moved to or from any peer.
        """
        progress = StallDeadline(self.peers.values(), deadline)
        while not wait([future], LOOK).done:
            for peer in awaited():
                if peer.mailbox.error is not None:
                    raise renewed(peer.mailbox.error)
                progress.check(what, peer)

    def drain(self, deadline: float) -> None:
        """Wait until every peer has acknowledged what it was sent."""
        for sent, peer in list(self._unacknowledged.items()):
            self.wait(sent, partial(list, [peer]), deadline, "an acknowledgement")
            if (error := sent.exception()) is not None:
                raise renewed(error) if isinstance(error, Exception) else error

    def close(self, timeout: float) -> None:
        """Drain for at most ``timeout`` seconds, then send nothing more."""
        self._closed = True
        wait(list(self._unacknowledged), timeout)
        self._sender.shutdown(cancel_futures=True)

    def _hand_over(self, done: Future[None], peer: Peer, tag: bytes, body: Data) -> None:
        peer.mailbox.send(tag, body, LABEL).add_done_callback(partial(self._delivered, done))

    def _delivered(self, done: Future[None], sent: Future[None]) -> None:
        if (error := sent.exception()) is None:
            del self._unacknowledged[done]
            done.set_result(None)
        else:
            done.set_exception(error)  # for whoever drains
