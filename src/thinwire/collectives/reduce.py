"""The sum of a tensor over the mesh: each rank sums one part for all, and sends it to all.

Reduce-scatter and all-gather, 2(N-1)/N of the tensor a rank as in a ring, but in two one-way delays instead
of 2(N-1), and every part has one place where it is summed. Parts travel in pieces: while some are on their
way, others are summed, and the sums of others go to all. Those of a card cross to the host, and back, piece
by piece beside that. Over a process group of torch the sum is the group's own.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.exchange import GroupWork, Posts
from thinwire.links.inbox import renewed
from thinwire.links.mesh import Peer
from thinwire.staging import memory, to_host
from thinwire.types import InputError, LinkError, PayloadError, require

DTYPES = (torch.float32, torch.bfloat16)
PIECE = 1 << 20  # values that travel and are summed together: few enough for a processor's cache
_STEPS = 40  # bits of a message's number that say its step; those above say its piece
_PART, _TOTAL = "part", "total"  # kinds of messages


class _Step:
    """One step on its way: what this rank posted, and what came for it to sum."""

    def __init__(self) -> None:
        self.values: Tensor | None = None  # what was posted: of the CPU its copy, of a card none of it
        self.shape = torch.Size()  # of what was posted
        self.here: dict[tuple[int, int], Tensor] = {}  # where it is summed, by rank and piece
        self.parts: defaultdict[int, dict[int, bytes]] = defaultdict(dict)  # what to sum: by piece, by rank
        self.waiting: set[int] = set()  # pieces of this rank's part that others have yet to send
        self.unsummed = 0  # pieces of it
        self.owed: Counter[int] = Counter()  # pieces that other ranks have yet to send the sums of
        self.summed: Future[None] = Future()  # this rank's part is, and is on its way to the others
        self.whole: Future[None] = Future()  # and the sums of all other parts are here


class MeshReduction:
    """A ``Reduction`` over links of ``connect_mesh``, on whose threads pieces are summed as they arrive.

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
            for kind, came in ((_PART, self._part_came), (_TOTAL, self._total_came)):
                peer.mailbox.on(self._posts.prefix(kind), self._handler(peer.rank, came))

    def post(self, step: int, values: Tensor) -> None:
        _check_dtype(values)
        flat = values.detach().reshape(-1)
        flat = flat.clone() if flat.is_cpu else flat
        parts = {rank: self._pieces(flat, rank) for rank in self.ranks}
        with self._lock:
            state = self._steps[step]
            state.values, state.shape = flat if flat.is_cpu else flat.new_empty(0), values.shape
            state.waiting, state.unsummed = set(range(len(parts[self.rank]))), len(parts[self.rank])
            state.owed.update({rank: len(parts[rank]) for rank in self._posts.peers})
        numbers = sorted((piece, rank) for rank in self.ranks for piece in range(len(parts[rank])))
        under_way = [(piece, rank, to_host([parts[rank][piece]])) for piece, rank in numbers]
        for piece, rank, staged in under_way:  # the next ones cross while this one is sent
            (part,) = staged.tensors()
            with self._lock:
                state.here[rank, piece] = part
            if rank == self.rank:
                self._sum_if_ready(step, piece)
            else:
                self._posts.send(self._posts.peers[rank], _PART, step + (piece << _STEPS), memory(part))

    def collect(self, step: int, deadline: float) -> Tensor:
        with self._lock:
            state = self._steps.get(step)
        if state is None or state.values is None:
            raise InputError(f"step {step} was not posted, or was collected before; post it first")
        self._finish(step, state, deadline)
        total = state.values if state.values.is_cpu else state.values.new_empty(state.shape.numel())
        self._bring(state, total, [self.rank])  # while the sums of others come
        self._wait(state.whole, lambda: +state.owed, deadline, f"the sum of step {step}")
        self._bring(state, total, self._posts.peers)
        with self._lock:
            del self._steps[step]
        return total.reshape(state.shape)

    def _bring(self, state: _Step, total: Tensor, ranks: Iterable[int]) -> None:
        """Copy the parts that ``ranks`` summed to ``total``, out of pinned memory, unless they are there."""
        for rank in ranks if not total.is_cpu else ():
            for number, piece in enumerate(self._pieces(total, rank)):
                piece.copy_(state.here[rank, number], non_blocking=True)

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

        def missing() -> set[int]:
            with self._lock:
                waiting = [state.parts[piece] for piece in state.waiting]
            return {rank for rank in self._posts.peers for parts in waiting if rank not in parts}

        self._wait(state.summed, missing, deadline, f"its part of step {step}")

    def _wait(
        self, future: Future[None], missing: Callable[[], Iterable[int]], deadline: float, what: str
    ) -> None:
        self._posts.wait(future, lambda: [self._posts.peers[rank] for rank in missing()], deadline, what)
        if (error := future.exception()) is not None:
            raise renewed(error) if isinstance(error, Exception) else error

    def _handler(
        self, rank: int, came: Callable[[int, int, int, bytes], None]
    ) -> Callable[[bytes, bytes], None]:
        def arrived(tag: bytes, body: bytes) -> None:
            piece, step = divmod(self._posts.step(tag), 1 << _STEPS)
            came(rank, step, piece, body)

        return arrived

    def _part_came(self, rank: int, step: int, piece: int, body: bytes) -> None:
        with self._lock:
            self._steps[step].parts[piece][rank] = body
        self._sum_if_ready(step, piece)

    def _sum_if_ready(self, step: int, piece: int) -> None:
        with self._lock:
            state = self._steps[step]
            parts = state.parts[piece]
            own = state.here.get((self.rank, piece))
            awaited = own is None and piece in state.waiting  # on its way from the card
            if state.values is None or awaited or len(parts) < len(self._posts.peers):
                return
            own = state.values.new_empty(0, device="cpu") if own is None else own  # a peer's part has more
            del state.parts[piece]
            state.waiting.discard(piece)
        try:
            total = self._sum(own, parts)
            for peer in self._posts.peers.values():
                self._posts.send(peer, _TOTAL, step + (piece << _STEPS), total)
        except (LinkError, PayloadError) as e:
            self._end(state.summed, e)
            return
        with self._lock:
            state.unsummed -= 1
        if not state.unsummed:
            self._end(state.summed)
        if not +state.owed:
            self._end(state.whole)  # there are no others

    def _sum(self, own: Tensor, parts: Mapping[int, bytes]) -> memoryview:
        """Sum a piece in place, in fp32 and the order of the ranks; return its bytes, elsewhere."""
        peers = self._posts.peers
        rows = [
            own.float().numpy() if rank == self.rank else _floats(parts[rank], own, peers[rank].name)
            for rank in self.ranks
        ]
        total = rows[0] + rows[1] if len(rows) > 1 else rows[0].copy()
        for row in rows[2:]:
            total += row
        rounded = torch.from_numpy(total).to(own.dtype)
        own.copy_(rounded)
        return memory(rounded)  # ``own`` is the caller's once it is collected

    def _total_came(self, rank: int, step: int, piece: int, body: bytes) -> None:
        with self._lock:
            state = self._steps[step]
        try:
            own = state.here.get((rank, piece))
            if own is not None:  # it is, unless the peer is none of this program's
                _check_size(own, body, self._posts.peers[rank].name)
                memory(own)[:] = body
        except PayloadError as e:
            self._end(state.whole, e)
            return
        with self._lock:
            state.owed[rank] -= 1
            done = not +state.owed
        if done:
            self._end(state.whole)

    def _end(self, future: Future[None], error: Exception | None = None) -> None:
        with self._lock:
            if not future.done():
                future.set_exception(error) if error else future.set_result(None)

    def _pieces(self, flat: Tensor, rank: int) -> tuple[Tensor, ...]:
        """Return the pieces of the part of a flat tensor that ``rank`` sums, one at least."""
        n, i = len(self.ranks), self.ranks.index(rank)
        return flat[len(flat) * i // n : len(flat) * (i + 1) // n].split(PIECE)


class GroupReduction(GroupWork):
    """A ``Reduction`` over ``group``, in the order of its own backend; the rest as for ``GroupExchange``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._posted: dict[int, tuple[dist.Work, Tensor, Tensor]] = {}  # the sum, and one of what was posted

    def post(self, step: int, values: Tensor) -> None:
        _check_dtype(values)
        flat = values.detach().reshape(-1)
        (own,) = to_host([flat.to(torch.float32, copy=flat.is_cpu)]).tensors()
        try:
            work = self._group.allreduce([own])
        except RuntimeError as e:
            raise self._lost(f"could not send the values of step {step} to", e) from e
        self._posted[step] = work, own.view(values.shape), values.new_empty(0)

    def collect(self, step: int, deadline: float) -> Tensor:
        require(step in self._posted, InputError, f"step {step} was not posted, or was collected before")
        self._wait(self._posted[step][0], deadline, f"the sum of step {step}")
        _, total, like = self._posted.pop(step)
        return total.to(like.device, like.dtype, non_blocking=True)

    def drain(self, deadline: float) -> None:
        for step, (work, _, _) in self._posted.items():
            self._wait(work, deadline, f"the sum of step {step}")

    def close(self, timeout: float = 5.0) -> None:
        with suppress(LinkError):
            self.drain(timeout)


def _check_dtype(values: Tensor) -> None:
    require(values.dtype in DTYPES, InputError, f"sums are of fp32 or bf16, not of {values.dtype}")


def _floats(body: bytes, like: Tensor, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the values that ``name`` sent for the piece ``like``."""
    _check_size(like, body, name)
    if like.dtype == torch.float32:
        return np.frombuffer(body, np.float32)
    return (np.frombuffer(body, np.uint16).astype(np.uint32) << 16).view(np.float32)  # bfloat16 is its top


def _check_size(part: Tensor, body: bytes, name: str) -> None:
    size = part.numel() * part.element_size()
    sizes = f"{len(body)} bytes for a part of {size}: its tensor is another one; compare the models"
    require(len(body) == size, PayloadError, f"{name} sent {sizes}")
