"""The two ends of a stage boundary in one direction: tensors in, packets over a link, tensors out.

``Outgoing`` encodes and posts, ``Incoming`` fetches and decodes; both know links and channels and nothing of
the engine that calls them. With a lane of its own each end works beside the caller: an engine goes on
computing while a tensor is encoded, and finds the next one decoded already. Each end keeps its packets in
order, because references move with every packet.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire import staging
from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.entries import Entries
from thinwire.channels.references import Store
from thinwire.links.mailbox import Mailbox
from thinwire.types import DesyncError, InputError, LinkError, Mode, TensorSpec
from thinwire.uses.training.pipeline.choosing.pipeline_policy import BACKWARD, FORWARD, Choice

NAMES = {FORWARD: "activations", BACKWARD: "gradients"}
TAG = struct.Struct("<cHH")  # direction, destination stage, micro-batch
RESYNC = struct.Struct("<ccH")  # b"R", direction, the stage asked; body: micro-batch u16
MAX_RESYNCS = 3
CLOSING = 0.5  # seconds


class NotFinite(InputError):
    """Values that are no finite numbers cannot be encoded; the text says between which stages."""


class Neighbour(Protocol):
    """A connected peer (``thinwire.links.Peer``)."""

    @property
    def mailbox(self) -> Mailbox: ...
    def wire_bytes(self, tag: bytes, nbytes: int) -> int:
        """Return the bytes on the wire of a message of ``nbytes`` with this tag, all headers included."""
        ...

    def get(self, tag: bytes, deadline: float, what: str) -> bytes:
        """Return the next message with this tag; ``LinkError`` after ``deadline`` s without any move."""
        ...


@dataclass
class StageTally:
    """What one stage did since the last ``take``: seconds by kind, values and bytes by direction.

    ``encode_s`` and ``decode_s`` count what held the stage up; work done beside its compute does not.
    """

    compute_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    values: dict[str, int] = field(default_factory=lambda: {FORWARD: 0, BACKWARD: 0})
    wire_bytes: dict[str, int] = field(default_factory=lambda: {FORWARD: 0, BACKWARD: 0})

    def take(self) -> StageTally:
        """Return a copy and start again from zero."""
        taken = StageTally(**self.__dict__)
        self.__dict__.update(StageTally().__dict__)
        return taken


class SecondsIn:
    """Add the seconds spent inside to one field of a tally."""

    def __init__(self, tally: StageTally, name: str) -> None:
        self._tally, self._name = tally, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self._start
        setattr(self._tally, self._name, getattr(self._tally, self._name) + spent)


class Caller(Executor):
    """Run each task at once, on the thread that submits it: the lane of an end that has none of its own."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as e:
            done.set_exception(e)
        return done


Task = tuple[Future[Any], Callable[[], Any]]


class Beside(Executor):
    """Run tasks in order on one thread, which unlike a pool's never keeps the interpreter from ending."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=_work_off, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None)  # nobody has to close it

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._closed:
            raise LinkError("this stage is closed")
        done: Future[Any] = Future()
        self._tasks.put((done, partial(fn, *args, **kwargs)))
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks; wait at most ``CLOSING`` seconds for the running one, which may wait itself."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while cancel_futures and (task := self._tasks.get_nowait()):
                task[0].cancel()
        self._tasks.put(None)
        if wait:
            self._thread.join(CLOSING)


def _work_off(tasks: queue.SimpleQueue[Task | None]) -> None:
    while _did(tasks.get()):
        pass


def _did(task: Task | None) -> bool:
    """Do a task and forget it, with the tensors it holds; return whether there was one."""
    if task is not None and task[0].set_running_or_notify_cancel():
        try:
            task[0].set_result(task[1]())
        except BaseException as e:
            task[0].set_exception(e)
    return task is not None


def lane(name: str, own: bool) -> Executor:
    """Return what runs one end's work in order: a thread of its own, or the caller's."""
    return Beside(name) if own else Caller()


class Outgoing:
    """The sending end: encodes tensors in the order of the calls and posts the packets."""

    def __init__(
        self, way: str, stage: int, scheme: Scheme, store: Store, tally: StageTally, own_lane: bool
    ) -> None:
        self.scheme, self.sender = scheme, Sender(scheme, store)
        self.choice: Choice | None = None  # None: the codecs of the scheme
        self._way, self._stage, self._tally = way, stage, tally
        self._to = stage + (1 if way == FORWARD else -1)
        self._lane = lane(f"encode {NAMES[way]} of stage {stage}", own_lane)
        self._lock = threading.Lock()  # a resync request arrives on a link's thread
        self._beside = staging.Beside()
        self._work: list[Future[None]] = []
        self._posted: Future[None] | None = None
        self._sent: dict[int, tuple[list[int], Tensor]] = {}  # by micro-batch, for a resync within the step

    def send(self, peer: Neighbour, mb: int, x: Tensor, ids: list[int], *, training: bool) -> None:
        """Send ``x`` [B, ...] of micro-batch ``mb`` under the samples' ``ids``; outside training as it is.

        Errors: ``LinkError`` where an earlier packet could not be sent.
        """
        with SecondsIn(self._tally, "encode_s"):
            if self._posted is not None and self._posted.done() and (e := self._posted.exception()):
                raise LinkError(str(e)) from e
            self._settle(wait=False)
            ready = staging.moment(x.device)  # the lane waits for x there, and for nothing queued after it
            self._work.append(self._lane.submit(self._send, peer, mb, x.detach(), ids, training, ready))
            self._settle(wait=False)

    def settle(self) -> None:
        """Wait until all is encoded and posted; raise what went wrong."""
        with SecondsIn(self._tally, "encode_s"):
            self._settle(wait=True)

    def _settle(self, wait: bool) -> None:
        while self._work and (wait or self._work[0].done()):
            self._work.pop(0).result()

    def _send(
        self,
        peer: Neighbour,
        mb: int,
        x: Tensor,
        ids: list[int],
        training: bool,
        ready: torch.cuda.Event | None,
    ) -> None:
        try:
            with self._lock, self._beside.on(x.device):
                staging.used_here(x, ready)
                self._encode(peer, mb, x, ids, training)
        except Exception as e:
            peer.mailbox.fail(e)  # or this end would wait for an answer to what never left
            raise

    def _encode(self, peer: Neighbour, mb: int, x: Tensor, ids: list[int], training: bool) -> None:
        choice = self.choice if training else None
        mode = Mode.DIRECT if not training or (choice and choice.direct) else None
        codec, keyframe = (choice.codec, choice.keyframe) if choice else (None, None)
        try:
            packet, x_hat = self.sender.encode(
                x, ids, slots(mb, len(x)), codec=codec, keyframe=keyframe, mode=mode
            )
            data = wire.packed(packet)
        except InputError as e:  # the codec cannot know which tensor it was
            kind = InputError if x.isfinite().all() else NotFinite
            raise kind(f"{NAMES[self._way]} of stage {self._stage} to {self._to}: {e}") from e
        if mode is None and self.scheme.memory.mirrored:
            self._sent[mb] = (ids, x_hat)
        self._post(peer, mb, data, self._way if training else "evaluation")
        self._tally.values[self._way] += x.numel()

    def _post(self, peer: Neighbour, mb: int, data: staging.Data, label: str) -> None:
        tag = TAG.pack(self._way[0].encode(), self._to, mb)
        self._posted = peer.mailbox.send(tag, data, label)
        self._tally.wire_bytes[self._way] += peer.wire_bytes(tag, len(data))

    def serve_resyncs(self, peer: Neighbour) -> None:
        """Answer a receiver that lost a reference with a keyframe, from now on."""
        tag = RESYNC.pack(b"R", self._way[0].encode(), self._stage)
        peer.mailbox.on(tag, lambda _tag, body: self._resend(peer, body))

    def _resend(self, peer: Neighbour, body: bytes) -> None:
        (mb,) = struct.unpack("<H", body)
        with self._lock:
            if mb not in self._sent:
                return  # nothing of ours; the asker's deadline names us
            ids, x_hat = self._sent[mb]
            with self._beside.on(x_hat.device):
                packet, _ = self.sender.encode(x_hat, ids, slots(mb, len(ids)), mode=Mode.KEYFRAME)
                self._post(peer, mb, wire.packed(packet), self._way)

    def states(self) -> Iterator[dict[str, Tensor]]:
        """Yield references and versions, a little at a time (``Sender.states``)."""
        with self._lock:
            self._beside.wait()
            yield from self.sender.states()

    def close(self) -> None:
        """Encode and post what waits, within ``CLOSING`` seconds, and free the references."""
        futures.wait(self._work, CLOSING)
        self._lane.shutdown(cancel_futures=True)
        self.sender.close()


class Landed(NamedTuple):
    """A decoded packet: the tensor, the samples' ids, when it arrived, and when a device decoded it."""

    x_hat: Tensor
    ids: list[int]
    arrived: float
    decoded: torch.cuda.Event | None


class Incoming:
    """The receiving end: fetches and decodes packets into the buffers that an engine reads."""

    def __init__(
        self, way: str, stage: int, store: Store, tally: StageTally, deadline: float, own_lane: bool
    ) -> None:
        self.receiver = Receiver(store)
        self._way, self._stage, self._tally, self._deadline = way, stage, tally, deadline
        self._from = stage - (1 if way == FORWARD else -1)
        self._ahead = own_lane
        self._beside = staging.Beside()
        self._lane = lane(f"decode {NAMES[way]} of stage {stage}", own_lane)
        self._awaited: dict[int, tuple[Tensor, Neighbour]] = {}
        self._started: dict[int, Future[Landed]] = {}

    def expect(self, mb: int, buffer: Tensor, peer: Neighbour) -> None:
        """Say that micro-batch ``mb`` is to come from ``peer`` into ``buffer``."""
        self._awaited[mb] = (buffer, peer)

    def land(self, mb: int, more: bool) -> list[int] | None:
        """Wait for a packet, decode it into its buffer and return the ids; None where none is expected.

        ``more``: micro-batch ``mb + 1`` follows in this step, and may be decoded as soon as it is here.
        Errors: ``LinkError`` that names the peer once it is gone or late; ``PayloadError`` for a packet that
        does not fit.
        """
        if mb not in self._awaited:
            return None
        buffer, peer = self._awaited.pop(mb)
        spec, start = TensorSpec.of(buffer), time.perf_counter()
        work = self._started.pop(mb, None) or self._lane.submit(self._take, peer, mb, spec, buffer.device)
        try:
            landed = work.result()
        finally:
            self._tally.wait_s += time.perf_counter() - start
        held_up = max(0.0, time.perf_counter() - max(start, landed.arrived))
        self._tally.wait_s -= held_up
        self._tally.decode_s += held_up
        with SecondsIn(self._tally, "decode_s"), torch.no_grad():
            staging.used_here(landed.x_hat, landed.decoded)
            buffer.copy_(landed.x_hat)
        if more and self._ahead:
            self._started[mb + 1] = self._lane.submit(self._take, peer, mb + 1, spec, buffer.device)
        return landed.ids

    def _take(self, peer: Neighbour, mb: int, spec: TensorSpec, device: torch.device) -> Landed:
        tag = TAG.pack(self._way[0].encode(), self._stage, mb)
        for attempt in range(MAX_RESYNCS + 1):
            data = peer.get(tag, self._deadline, f"{NAMES[self._way]} of micro-batch {mb}")
            arrived = time.perf_counter()
            try:
                with self._beside.on(device):
                    packet = wire.unpack(data, max(4, spec.dtype.itemsize) * spec.numel, device)
                    x_hat = self.receiver.decode(packet, slots(mb, spec.shape[0]), expect=spec)
                    decoded = staging.moment(device)
            except DesyncError as e:
                if attempt == MAX_RESYNCS:
                    raise
                self.receiver.reset(e.keys)
                asked = RESYNC.pack(b"R", self._way[0].encode(), self._from)
                peer.mailbox.send(asked, struct.pack("<H", mb), "control")
                continue
            return Landed(x_hat, Entries.of(packet.entries).keys, arrived, decoded)
        raise DesyncError(f"{NAMES[self._way]} of micro-batch {mb} stay out of step", ())

    def states(self) -> Iterator[dict[str, Tensor]]:
        """Yield references and versions, a little at a time (``Receiver.states``)."""
        self._beside.wait()
        yield from self.receiver.states()

    def close(self) -> None:
        """Await no more packets, and free the references."""
        self._lane.shutdown(cancel_futures=True)
        self.receiver.close()


def slots(mb: int, n: int) -> list[int]:
    """Return the places of a micro-batch's ``n`` samples within the step."""
    return list(range(mb * n, (mb + 1) * n))


def announce(peer: Neighbour, tag: bytes, ids: Sequence[int]) -> None:
    """Tell a peer which samples come next, so that it can fetch their references from disk."""
    peer.mailbox.send(tag, struct.pack(f"<{len(ids)}Q", *ids), "control")


def announced(body: bytes) -> list[int]:
    """Return the ids of an announcement; ``struct.error`` for anything else."""
    return list(struct.unpack(f"<{len(body) // 8}Q", body))
