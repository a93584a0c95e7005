"""Exchanges of messages by step: the contracts, one over the mesh, one over a process group of torch.

Post what belongs to a step, go on computing, collect it later.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.links.inbox import pending, renewed
from thinwire.links.mailbox import Opener
from thinwire.links.mesh import LOOK, Peer, StallDeadline, get_all
from thinwire.links.message import Data
from thinwire.links.pair.reliable import PIECE
from thinwire.types import ByteCursor, InputError, LinkError, PayloadError, require

LABEL = "exchange"  # the traffic class for the meters
_STEP = struct.Struct("<Q")
LENGTH = struct.Struct("<I")  # of a packet in a message
_GROUP_LENGTH = struct.Struct("<Q")  # of a message among those of a group


class Exchange(Protocol):
    """One message of each participant to every other, by step.

    All participants post and collect the same steps. ``post`` queues and returns, and the message travels
    while the caller computes, so several steps can be on their way. A step is posted once and collected
    once. A peer may be ahead: what it sent for later steps waits until it is collected::

        exchange.post(step, payload)
        ...                                       # compute
        if step >= staleness:
            payloads = exchange.collect(step - staleness, deadline=180.0)

    Not for several threads at once, except that one may post while another collects.
    """

    @property
    def rank(self) -> int:
        """This participant."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """All participants in ascending order, this one included."""
        ...

    @property
    def capacity(self) -> int | None:
        """Bytes of a message that fit at most; None where any length does."""
        ...

    def post(self, step: int, payload: Data) -> int:
        """Send ``payload`` to every peer in the background; return how many of its bytes fit, from the first.

        The rest is not sent: the caller keeps it. ``payload`` is copied, so its buffer is free on return.
        Errors: ``LinkError`` that names a peer which is lost.
        """
        ...

    def collect(self, step: int, deadline: float) -> dict[int, bytes]:
        """Return what every peer posted for ``step``, by rank in ascending order.

        Errors: ``LinkError`` that names the silent peer after ``deadline`` seconds without progress, or one
        that is lost. Bytes that still arrive are progress: a slow line is not late.
        """
        ...

    def drain(self, deadline: float) -> None:
        """Wait until all peers have what was posted; errors as for ``collect``."""
        ...

    def close(self, timeout: float = 5.0) -> None:
        """Drain for at most ``timeout`` seconds, without errors; later posts are refused. Safe to call twice.

        The links or the group below stay open: they belong to whoever made them.
        """
        ...


class Reduction(Protocol):
    """The sum over all participants of a flat tensor (fp32 or bf16), by step; otherwise like ``Exchange``.

    The sum has the dtype of the tensors and the same bits on every rank: each part is summed in one place, in
    fp32; over the mesh in the order of the ranks.
    """

    @property
    def rank(self) -> int:
        """This participant."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """All participants in ascending order, this one included."""
        ...

    def post(self, step: int, values: Tensor) -> None:
        """Begin to sum ``values`` in the background; they are copied, so the caller may change them."""
        ...

    def collect(self, step: int, deadline: float) -> Tensor:
        """Return the sum for ``step``, a new tensor of the posted one's shape.

        Errors: as for ``Exchange.collect``, and ``PayloadError`` for a peer whose tensor has another size.
        """
        ...

    def drain(self, deadline: float) -> None:
        """Wait until all peers have what this rank owes them for what both sides posted."""
        ...

    def close(self, timeout: float = 5.0) -> None:
        """Drain for at most ``timeout`` seconds, without errors. Safe to call twice."""
        ...


class MeshExchange:
    """An ``Exchange`` over links of ``connect_mesh``, whose threads send and receive: one delay a message.

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

    def hand_over(self, step: int, payloads: Mapping[int, Data]) -> None:
        """Scatter payloads that nobody writes to any more: they are not copied."""
        for rank, payload in payloads.items():
            self._posts.send(self._posts.peers[rank], "message", step, payload, at_once=True)

    def collect(
        self,
        step: int,
        deadline: float,
        what: str = "",
        final: Callable[[Any], bool] | None = None,
    ) -> dict[int, Any]:
        """Collect as any ``Exchange``; ``what`` is awaited, in words of an error; ``final``: ``get_all``."""
        return self._posts.get(self.peers, "message", step, deadline, what or _message(step), final)

    def receive(self, rank: int, step: int, deadline: float, what: str = "") -> Any:
        """Return the message of one peer alone; what the others send for this step stays."""
        return self._posts.get([rank], "message", step, deadline, what or _message(step))[rank]

    def opened_by(self, opener: Opener | None) -> None:
        """Let ``opener`` make of messages what ``collect`` and ``receive`` return; see ``Mailbox``."""
        for peer in self.peers.values():
            peer.mailbox.opens(self._posts.prefix("message"), opener)

    def drain(self, deadline: float) -> None:
        self._posts.drain(deadline)

    def close(self, timeout: float = 5.0) -> None:
        self._posts.close(timeout)


def _message(step: int) -> str:
    return f"the message of step {step}"


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

    def send(self, peer: Peer, kind: str, step: int, body: Data, at_once: bool = False) -> None:
        """Queue one message; ``body`` stays as it is until the peer has it. ``at_once``: on this thread."""
        require(not self._closed, LinkError, f"the exchange {self.name!r} is closed")
        if peer.mailbox.error is not None:
            raise renewed(peer.mailbox.error)
        if at_once or len(body) <= PIECE:
            sent = peer.mailbox.send(self.tag(kind, step), body, LABEL)
            self._unacknowledged[sent] = peer
            sent.add_done_callback(self._acknowledged)
            return
        done = pending()
        self._unacknowledged[done] = peer  # copying and its check sums take a while
        self._sender.submit(self._hand_over, done, peer, self.tag(kind, step), body)

    def get(
        self,
        ranks: Iterable[int],
        kind: str,
        step: int,
        deadline: float,
        what: str,
        final: Callable[[Any], bool] | None = None,
    ) -> dict[int, Any]:
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

    def _acknowledged(self, sent: Future[None]) -> None:
        if sent.exception() is None:  # else it is for whoever drains
            del self._unacknowledged[sent]


@dataclass
class _Posted:
    work: dist.Work
    own: Tensor  # the all-gather reads it until it is done
    buffers: list[Tensor]


class GroupWork:
    """What an exchange or a reduction over ``group`` waits for; its ranks number the participants."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self.ranks = group, group.rank(), tuple(range(group.size()))

    def _wait(self, work: dist.Work, deadline: float, what: str) -> None:
        try:
            work.wait(timedelta(seconds=deadline))
        except RuntimeError as e:
            lost = "lost" if work.is_completed() else f"waited {deadline:g} s for"
            raise self._lost(f"{lost} {what} from", e) from e

    def _lost(self, what: str, error: RuntimeError) -> LinkError:
        others = ", ".join(str(r) for r in self.ranks if r != self.rank)
        return LinkError(f"{what} rank {others} of the group: {str(error).partition('. ')[0]}")


class GroupExchange(GroupWork):
    """An ``Exchange`` over ``group``, for messages of at most ``capacity`` bytes; longer ones fit in part.

    All participants post the same steps in the same order, with the same capacity. Every message takes the
    capacity on the wire. ``group`` is used for nothing else meanwhile, and its ranks number the participants.
    """

    def __init__(self, group: dist.ProcessGroup, capacity: int) -> None:
        require(capacity > 0, InputError, f"a message has room for {capacity} bytes; give it 1 at least")
        super().__init__(group)
        self.capacity = capacity
        self._posted: dict[int, _Posted] = {}
        self._closed = False

    def post(self, step: int, payload: Data) -> int:
        require(not self._closed, LinkError, "this exchange is closed")
        body = memoryview(payload).cast("B")[: self.capacity]
        own = torch.zeros(_GROUP_LENGTH.size + self.capacity, dtype=torch.uint8)
        own.numpy()[: _GROUP_LENGTH.size + len(body)] = np.frombuffer(
            _GROUP_LENGTH.pack(len(body)) + body, np.uint8
        )
        buffers = [torch.empty_like(own) for _ in self.ranks]
        try:
            work = self._group.allgather([buffers], [own])
        except RuntimeError as e:
            raise self._lost(f"could not send the message of step {step} to", e) from e
        self._posted[step] = _Posted(work, own, buffers)
        return len(body)

    def collect(self, step: int, deadline: float) -> dict[int, bytes]:
        require(step in self._posted, InputError, f"step {step} was not posted, or was collected before")
        self._wait(self._posted[step].work, deadline, _message(step))
        posted = self._posted.pop(step)
        return {r: self._message(posted.buffers[r], r) for r in self.ranks if r != self.rank}

    def drain(self, deadline: float) -> None:
        for step, posted in self._posted.items():
            self._wait(posted.work, deadline, _message(step))

    def close(self, timeout: float = 5.0) -> None:
        self._closed = True
        with suppress(LinkError):
            self.drain(timeout)

    def _message(self, buffer: Tensor, rank: int) -> bytes:
        (length,) = _GROUP_LENGTH.unpack(buffer[: _GROUP_LENGTH.size].numpy().tobytes())
        text = f"rank {rank} sent {length} bytes where {self.capacity} fit; give all ranks one capacity"
        require(length <= self.capacity, PayloadError, text)
        return buffer[_GROUP_LENGTH.size : _GROUP_LENGTH.size + length].numpy().tobytes()


class Framing:
    """How the messages of one engine lie in bytes, little-endian: its version, and fields of its own.

    Version u8, state u8 (below ``states``), packets u16, the ``fields``; each packet behind its length, u32.
    """

    def __init__(self, version: int, states: int, fields: str) -> None:
        self._version, self._states, self._head = version, states, struct.Struct(f"<BBH{fields}")
        self.size = self._head.size  # bytes of a message without packets

    def before(self, state: int, nbytes: int, *fields: float) -> bytes:
        """Return what stands before the only packet of a message, ``nbytes`` long."""
        return self._head.pack(self._version, state, 1, *fields) + LENGTH.pack(nbytes)

    def pack(self, state: int, packets: Sequence[bytes | memoryview], *fields: float) -> bytes:
        """Return a message as bytes."""
        parts: list[bytes | memoryview] = [self._head.pack(self._version, state, len(packets), *fields)]
        for packet in packets:
            parts += LENGTH.pack(len(packet)), packet
        return b"".join(parts)

    def unpack(self, data: bytes | memoryview) -> tuple[int, list[memoryview], list[Any]]:
        """Return the state, the packets and the fields of a message. Errors: ``PayloadError``."""
        cursor = ByteCursor(data, "the message of an exchange")
        version, state, count, *fields = cursor.unpack(self._head)
        known = version == self._version and state < self._states
        require(known, PayloadError, "an exchange's message of another version")
        packets = [cursor.take(*cursor.unpack(LENGTH)) for _ in range(count)]
        cursor.close()
        return state, packets, fields


def words_of(data: bytes, sender: str) -> dict[str, object]:
    """Return the JSON object that ``sender`` says of itself. Errors: ``PayloadError``."""
    wrong = f"what {sender} says of itself cannot be read"
    try:
        found = json.loads(data)
    except ValueError as e:
        raise PayloadError(wrong) from e
    require(isinstance(found, dict), PayloadError, wrong)
    return dict(found)
