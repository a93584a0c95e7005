"""The sum of a tensor over the mesh: each rank sums one part for all, and sends it to all.

Reduce-scatter and all-gather, 2(N-1)/N of the tensor a rank as in a ring, but in two one-way delays instead
of 2(N-1), and every part has one place where it is summed.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from thinwire.collectives.exchange import Posts
from thinwire.links.inbox import renewed
from thinwire.links.mesh import Peer
from thinwire.types import InputError, LinkError, PayloadError, require

DTYPES = (torch.float32, torch.bfloat16)


class _Step:
    """One step on its way: what this rank posted, and the parts that came for it to sum."""

    def __init__(self) -> None:
        self.values: Tensor | None = None  # what was posted; from then on the place of the sum
        self.shape = torch.Size()
        self.parts: dict[int, bytes] = {}  # of the peers, by rank
        self.begun = False
        self.summed: Future[None] = Future()  # this rank's part is, and is on its way to the others


class MeshReduction:
    """A ``Reduction`` over links of ``connect_mesh``, on whose threads parts are summed as they arrive.

    ``ranks`` and ``name`` as in ``MeshExchange``.
    """

    def __init__(
        self, rank: int, peers: Mapping[int, Peer], ranks: Iterable[int] | None = None, name: str = "sum"
    ) -> None:
        self._posts = Posts(rank, peers, ranks, name)
        self.rank, self.ranks = rank, self._posts.ranks
        self._steps: defaultdict[int, _Step] = defaultdict(_Step)
        self._lock = threading.Lock()
        for peer in self._posts.peers.values():
            peer.mailbox.on(self._posts.prefix("part"), self._handler(peer.rank))

    def post(self, step: int, values: Tensor) -> None:
        require(values.dtype in DTYPES, InputError, f"sums are of fp32 or bf16, not of {values.dtype}")
        flat = values.detach().to("cpu", copy=True).reshape(-1)
        for peer in self._posts.peers.values():
            self._posts.send(peer, "part", step, _data(self._part(flat, peer.rank)))
        with self._lock:
            state = self._steps[step]
            state.values, state.shape = flat, values.shape
        self._sum_if_ready(step, state)

    def collect(self, step: int, deadline: float) -> Tensor:
        with self._lock:
            state = self._steps.get(step)
        if state is None or state.values is None:
            raise InputError(f"step {step} was not posted, or was collected before; post it first")
        self._finish(step, state, deadline)
        peers = self._posts.peers
        for rank, body in self._posts.get(peers, "total", step, deadline, f"the sum of step {step}").items():
            _fill(self._part(state.values, rank), body, peers[rank].name)
        with self._lock:
            del self._steps[step]
        return state.values.reshape(state.shape)

    def drain(self, deadline: float) -> None:
        with self._lock:
            posted = [(step, state) for step, state in self._steps.items() if state.values is not None]
        for step, state in posted:
            self._finish(step, state, deadline)
        self._posts.drain(deadline)

    def close(self, timeout: float = 5.0) -> None:
        self._posts.close(timeout)

    def _finish(self, step: int, state: _Step, deadline: float) -> None:
        """Wait until this rank's part is summed."""

        def missing() -> list[Peer]:
            return [peer for rank, peer in self._posts.peers.items() if rank not in state.parts]

        self._posts.wait(state.summed, missing, deadline, f"its part of step {step}")
        if (error := state.summed.exception()) is not None:
            raise renewed(error) if isinstance(error, Exception) else error

    def _handler(self, rank: int) -> Callable[[bytes, bytes], None]:
        def arrived(tag: bytes, body: bytes) -> None:
            step = self._posts.step(tag)
            with self._lock:
                state = self._steps[step]
                state.parts[rank] = body
            self._sum_if_ready(step, state)

        return arrived

    def _sum_if_ready(self, step: int, state: _Step) -> None:
        with self._lock:
            if state.begun or state.values is None or len(state.parts) < len(self.ranks) - 1:
                return
            state.begun = True
        try:
            total = self._sum(state.values, state.parts)
            for peer in self._posts.peers.values():
                self._posts.send(peer, "total", step, total)
        except (LinkError, PayloadError) as e:
            state.summed.set_exception(e)
        else:
            state.summed.set_result(None)

    def _sum(self, values: Tensor, parts: dict[int, bytes]) -> bytes:
        """Sum this rank's part in place, in fp32 and the order of the ranks; return its bytes."""
        own = self._part(values, self.rank)
        total = torch.zeros_like(own, dtype=torch.float32)
        for rank in self.ranks:
            part = own
            if rank != self.rank:
                part = torch.empty_like(own)
                _fill(part, parts[rank], self._posts.peers[rank].name)
            total += part
        own.copy_(total)
        return bytes(_data(own))  # the tensor is the caller's once it is collected

    def _part(self, flat: Tensor, rank: int) -> Tensor:
        """Return the part of a flat tensor that ``rank`` sums."""
        n, i = len(self.ranks), self.ranks.index(rank)
        return flat[len(flat) * i // n : len(flat) * (i + 1) // n]


def _data(part: Tensor) -> memoryview:
    view: memoryview = part.view(torch.uint8).numpy().data
    return view


def _fill(part: Tensor, body: bytes, name: str) -> None:
    """Copy the bytes that ``name`` sent into ``part``."""
    size = part.numel() * part.element_size()
    sizes = f"{len(body)} bytes for a part of {size}: its tensor is another one; compare the models"
    require(len(body) == size, PayloadError, f"{name} sent {sizes}")
    part.view(torch.uint8).numpy()[:] = np.frombuffer(body, np.uint8)
