"""Each participant's message straight to every peer of the mesh: one one-way delay, whatever their number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from thinwire.collectives.posts import Posts
from thinwire.links.base import Data
from thinwire.links.mesh import Peer


class MeshExchange:
    """An ``Exchange`` over links of ``connect_mesh``, whose threads send and receive.

    - ``ranks``: the participants, such as the replicas of one stage; all ranks of the mesh if None.
    - ``name``: the same on all participants. Exchanges of one name are told apart by their order, which is
      the same on all of them.
    """

    capacity = None

    def __init__(
        self, rank: int, peers: Mapping[int, Peer], ranks: Iterable[int] | None = None, name: str = "gather"
    ) -> None:
        self._posts = Posts(rank, peers, ranks, name)
        self.rank, self.ranks, self.name = rank, self._posts.ranks, self._posts.key

    @property
    def peers(self) -> Mapping[int, Peer]:
        """The links to the others, by rank."""
        return self._posts.peers

    def post(self, step: int, payload: Data) -> int:
        body = bytes(payload)  # once for all peers
        for peer in self._posts.peers.values():
            self._posts.send(peer, "message", step, body)
        return len(body)

    def scatter(self, step: int, payloads: Mapping[int, Data]) -> None:
        """Send each peer a payload of its own, by rank, in place of ``post``."""
        for rank, payload in payloads.items():
            self._posts.send(self._posts.peers[rank], "message", step, bytes(payload))

    def collect(
        self,
        step: int,
        deadline: float,
        what: str = "",
        final: Callable[[bytes], bool] | None = None,
    ) -> dict[int, bytes]:
        """Collect as any ``Exchange``; ``what`` is awaited, in words of an error; ``final``: ``get_all``."""
        return self._posts.get(self.peers, "message", step, deadline, what or _message(step), final)

    def receive(self, rank: int, step: int, deadline: float, what: str = "") -> bytes:
        """Return the message of one peer alone; what the others send for this step stays."""
        return self._posts.get([rank], "message", step, deadline, what or _message(step))[rank]

    def drain(self, deadline: float) -> None:
        self._posts.drain(deadline)

    def close(self, timeout: float = 5.0) -> None:
        self._posts.close(timeout)


def _message(step: int) -> str:
    return f"the message of step {step}"
