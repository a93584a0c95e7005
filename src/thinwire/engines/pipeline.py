"""Compressed pipeline stages: a drop-in for ``torch.distributed.pipelining.PipelineStage`` (torch 2.13).

This file holds everything that depends on how torch's schedules treat a stage. ``get_*_ops`` return no
operations, because packets travel over thinwire's own links, and ``*_one_chunk`` first land what the link
brought in the buffer the schedule is about to read. Of torch's private methods only the two of the vote
before a first step or evaluation are overridden: through the process group it would have neither the links'
encryption nor their deadlines. The schedules themselves stay untouched; ``tests/test_pipeline.py`` holds the
conformance test (raw codec: bit-equal).
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _StageBackwardMeta, _StageForwardMeta, _TensorMeta
from torch.distributed.pipelining.stage import InferenceMode

from thinwire import wire
from thinwire.channel import Receiver, Scheme, Sender
from thinwire.links.mailbox import Mailbox
from thinwire.memory import NoMemory
from thinwire.store import Store, TensorStore, under
from thinwire.types import DesyncError, InputError, LinkError, Mode, PayloadError, TensorSpec

FORWARD, BACKWARD = "forward", "backward"
NAMES = {FORWARD: "activations", BACKWARD: "gradients"}
TAG = struct.Struct("<cHH")  # direction, destination stage, micro-batch
RESYNC = struct.Struct("<ccH")  # b"R", direction, the stage asked; body: micro-batch u16
VOTE = struct.Struct("<ccH")  # b"V", direction, destination stage; body: whether all stages so far are static
MAX_RESYNCS = 3


class Directions(Protocol):
    """What a recipe says: one scheme for activations, one for gradients."""

    @property
    def forward(self) -> Scheme: ...
    @property
    def backward(self) -> Scheme: ...


class Neighbour(Protocol):
    """A connected peer (``thinwire.links.Peer``)."""

    @property
    def mailbox(self) -> Mailbox: ...
    def wire_bytes(self, tag: bytes, nbytes: int) -> int:
        """Return the bytes on the wire of a message of ``nbytes`` with this tag, all headers included."""
        ...

    def arrived(self) -> int:
        """Return the bytes received so far, heartbeats and the like left out."""
        ...


@dataclass
class Tally:
    """What one stage did since the last ``take``: seconds by kind, values and packets by direction."""

    compute_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    values: dict[str, int] = field(default_factory=lambda: {FORWARD: 0, BACKWARD: 0})
    wire_bytes: dict[str, int] = field(default_factory=lambda: {FORWARD: 0, BACKWARD: 0})

    def take(self) -> Tally:
        """Return a copy and start again from zero."""
        taken = Tally(**self.__dict__)
        self.__dict__.update(Tally().__dict__)
        return taken


class CompressedStage(PipelineStage):
    """A pipeline stage whose neighbours receive compressed changes instead of tensors.

    Takes all arguments of ``PipelineStage``, and by keyword: ``peers``, the connected peers by global rank;
    ``recipe``, its schemes for both directions; ``deadline``, the seconds without any data after which a
    wait on a neighbour fails;
    ``store``, which makes the places where references live (memory; ``DiskStore`` for more than that holds).
    Before each ``schedule.step`` call ``begin(ids)`` on the first stage: the ids of the batch's samples, by
    which references are kept; later stages learn them from the packets. Evaluation (``schedule.eval``) sends
    plain values and touches no reference.

    Errors: ``LinkError`` naming the neighbour that is gone or late; ``PayloadError`` for a packet that does
    not fit; ``InputError`` where the recipe keeps state by sample and no ids were given.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *args: Any,
        peers: Mapping[int, Neighbour],
        recipe: Directions,
        deadline: float = 60.0,
        store: Callable[[], Store] = TensorStore,
        **kwargs: Any,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, *args, **kwargs)
        self.tally = Tally()
        self._peers, self._deadline = peers, deadline
        self._schemes = {FORWARD: recipe.forward, BACKWARD: recipe.backward}
        self._senders = {way: Sender(scheme, store()) for way, scheme in self._schemes.items()}
        self._receivers = {FORWARD: Receiver(store()), BACKWARD: Receiver(store())}
        self._ids: dict[int, list[int]] = {}
        self._awaited: dict[tuple[str, int], tuple[Tensor, int]] = {}
        self._sent: dict[tuple[str, int], tuple[list[int], Tensor]] = {}  # for a resync within the step
        self._pending: dict[int, Future[None]] = {}
        self._lock = threading.Lock()  # a resync request arrives on a link's thread
        for way, step in ((FORWARD, 1), (BACKWARD, -1)):
            neighbour = stage_index + step
            if 0 <= neighbour < num_stages:
                self._serve_resyncs(way, neighbour)

    def begin(self, ids: Tensor | Sequence[int], microbatches: int) -> None:
        """Name the samples of the coming step's batch, in order, before it is cut into micro-batches."""
        numbers = [int(i) for i in ids]
        if microbatches < 1 or len(numbers) % microbatches:
            raise InputError(f"{len(numbers)} sample ids do not divide into {microbatches} micro-batches")
        size = len(numbers) // microbatches
        self._ids = {m: numbers[m * size : (m + 1) * size] for m in range(microbatches)}

    # -- what the schedules call ---------------------------------------------------------------------------

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send_all(super().get_fwd_send_ops(fwd_chunk_id), FORWARD, fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send_all(super().get_bwd_send_ops(bwd_chunk_id), BACKWARD, bwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._await_all(super().get_fwd_recv_ops(fwd_chunk_id), FORWARD, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._await_all(super().get_bwd_recv_ops(bwd_chunk_id), BACKWARD, bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._land(FORWARD, fwd_chunk_id)
        with _Timed(self.tally, "compute_s"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._land(BACKWARD, bwd_chunk_id)
        with _Timed(self.tally, "compute_s"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    # -- sending -------------------------------------------------------------------------------------------

    def _send_all(self, ops: list[dist.P2POp], way: str, mb: int) -> list[dist.P2POp]:
        self._only_one(ops)
        for op in ops:
            self._raise_failed(op.peer)
            with _Timed(self.tally, "encode_s"), self._lock:
                data, x_hat = self._encode(way, mb, op.tensor)
                self._post(way, mb, op.peer, data)
            self.tally.values[way] += x_hat.numel()
        return []

    def _only_one(self, ops: list[dist.P2POp]) -> None:
        if len(ops) > 1:
            raise InputError(
                f"stage {self.stage_index} passes {len(ops)} tensors; let it pass one, the hidden state"
            )

    def _encode(self, way: str, mb: int, x: Tensor) -> tuple[bytes, Tensor]:
        scheme, ids, slots = self._schemes[way], self._ids_of(way, mb, len(x)), _slots(mb, len(x))
        mode = None if self.has_backward else Mode.DIRECT
        packet, x_hat = self._senders[way].encode(x, ids, slots, mode=mode)
        if mode is None and scheme.memory.mirrored:
            self._sent[way, mb] = (ids, x_hat)
        return wire.pack(packet), x_hat

    def _ids_of(self, way: str, mb: int, n: int) -> list[int]:
        # The first stage's ids are used once, so that a forgotten begin() cannot pass for the last step's.
        ids = self._ids.pop(mb, None) if self.is_first else self._ids.get(mb)
        if ids is not None:
            return ids
        # Either direction's: the ids that go out with the activations come back as keys of the gradients.
        by_sample = any(
            s.memory.key == "sample" and not isinstance(s.memory, NoMemory) for s in self._schemes.values()
        )
        if self.has_backward and by_sample:
            raise InputError(
                "this recipe keeps references by sample: call stage.begin(ids, n) before each step"
            )
        return _slots(mb, n)

    def _post(self, way: str, mb: int, peer: int, data: bytes) -> None:
        to = self.stage_index + (1 if way == FORWARD else -1)
        label = way if self.has_backward else "evaluation"
        tag = TAG.pack(way[0].encode(), to, mb)
        self._pending[peer] = self._peers[peer].mailbox.send(tag, data, label)
        self.tally.wire_bytes[way] += self._peers[peer].wire_bytes(tag, len(data))

    def _raise_failed(self, peer: int) -> None:
        last = self._pending.get(peer)
        if last is not None and last.done() and (error := last.exception()) is not None:
            raise LinkError(str(error)) from error

    # -- receiving -----------------------------------------------------------------------------------------

    def _await_all(self, ops: list[dist.P2POp], way: str, mb: int) -> list[dist.P2POp]:
        self._only_one(ops)
        for op in ops:
            self._awaited[way, mb] = (op.tensor, op.peer)
        return []

    def _land(self, way: str, mb: int) -> None:
        """Wait for a packet and decode it into the schedule's buffer; at the pipeline's ends do nothing."""
        if (way, mb) not in self._awaited:
            return
        landing, peer = self._awaited.pop((way, mb))
        for attempt in range(MAX_RESYNCS + 1):
            data = self._fetch(way, mb, peer)
            with _Timed(self.tally, "decode_s"):
                packet = wire.unpack(data, max_nbytes=max(4, landing.element_size()) * landing.numel())
                try:
                    x_hat = self._receivers[way].decode(
                        packet, _slots(mb, len(landing)), expect=TensorSpec.of(landing)
                    )
                except DesyncError as e:
                    if attempt == MAX_RESYNCS:
                        raise
                    self._receivers[way].reset(e.keys)
                    self._ask_resync(way, mb, peer)
                    continue
                with torch.no_grad():
                    landing.copy_(x_hat)
            if way == FORWARD:
                self._ids[mb] = [e.key for e in packet.entries]
            return

    def _fetch(self, way: str, mb: int, peer: int) -> bytes:
        tag = TAG.pack(way[0].encode(), self.stage_index, mb)
        what, source = f"{NAMES[way]} of micro-batch {mb}", self._peers[peer]
        with _Timed(self.tally, "wait_s"):
            while True:
                before = source.arrived()
                try:
                    return source.mailbox.get(tag, self._deadline, what)
                except LinkError:  # what still arrives, if slowly, is not late
                    if source.mailbox.error is not None or source.arrived() == before:
                        raise

    # -- resynchronisation: a receiver that lost a reference asks for a keyframe ----------------------------

    def _ask_resync(self, way: str, mb: int, peer: int) -> None:
        source = self.stage_index - (1 if way == FORWARD else -1)
        tag = RESYNC.pack(b"R", way[0].encode(), source)
        self._peers[peer].mailbox.send(tag, struct.pack("<H", mb), "control")

    def _serve_resyncs(self, way: str, neighbour: int) -> None:
        peer = self.stage_index_to_group_rank[neighbour]
        if self.group is not None:
            peer = dist.get_global_rank(self.group, peer)
        tag = RESYNC.pack(b"R", way[0].encode(), self.stage_index)
        if peer in self._peers:
            self._peers[peer].mailbox.on(tag, lambda _tag, body: self._resend(way, peer, body))

    def _resend(self, way: str, peer: int, body: bytes) -> None:
        (mb,) = struct.unpack("<H", body)
        with self._lock:
            if (way, mb) not in self._sent:
                return  # nothing of ours; the asker's deadline names us
            ids, x_hat = self._sent[way, mb]
            packet, _ = self._senders[way].encode(x_hat, ids, _slots(mb, len(ids)), mode=Mode.KEYFRAME)
            self._post(way, mb, peer, wire.pack(packet))

    # -- the vote: do all stages know their shapes, or must the first micro-batch tell them? -----------------

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        static = not InferenceMode.needs_dynamic(self._user_meta, has_backward)
        if not self.is_first:
            static = self._vote(FORWARD, self.stage_index - 1, received_acc) and static
        self._pass_vote(FORWARD, self.stage_index + 1, static)
        return torch.tensor([int(static)], dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        static = self._vote(BACKWARD, self.stage_index + (not self.is_last), received_result)
        self._pass_vote(BACKWARD, self.stage_index - 1, static)
        return torch.tensor([int(static)], dtype=torch.int32)

    def _vote(self, way: str, source: int, known: Tensor | None) -> bool:
        if self._is_same_rank(source):
            if known is None:
                raise InputError(f"stage {source} is on this rank too, but the schedule has no vote of it")
            return bool(known.item())
        tag = VOTE.pack(b"V", way[0].encode(), self.stage_index)
        peer = self._peers[self._resolve_peer_global_rank(source)]
        return peer.mailbox.get(tag, self._deadline, f"the start of stage {source}") == b"\1"

    def _pass_vote(self, way: str, to: int, static: bool) -> None:
        if 0 <= to < self.num_stages and not self._is_same_rank(to):
            tag = VOTE.pack(b"V", way[0].encode(), to)
            self._peers[self._resolve_peer_global_rank(to)].mailbox.send(tag, bytes([static]), "control")

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        """Tell a neighbour the shapes that the first micro-batch showed; torch itself would pickle them."""
        way = FORWARD if isinstance(meta, _StageForwardMeta) else BACKWARD
        found = meta.forward_metas if way == FORWARD else meta.backward_metas
        rows = [m and (list(m.shape), list(m.stride), wire.CODES[m.dtype], m.requires_grad) for m in found]
        tag = VOTE.pack(b"M", way[0].encode(), dst_stage)
        peer = self._peers[self._resolve_peer_global_rank(dst_stage)]
        peer.mailbox.send(tag, json.dumps(rows).encode(), "control")

    def _recv_meta(self, src_stage: int) -> Any:
        way = FORWARD if src_stage < self.stage_index else BACKWARD
        tag = VOTE.pack(b"M", way[0].encode(), self.stage_index)
        peer = self._peers[self._resolve_peer_global_rank(src_stage)]
        data = peer.mailbox.get(tag, self._deadline, f"the shapes that stage {src_stage} passes")
        try:
            metas = tuple(
                row and _TensorMeta(torch.Size(row[0]), tuple(row[1]), wire.DTYPES[row[2]], bool(row[3]))
                for row in json.loads(data)
            )
        except (ValueError, TypeError, IndexError, KeyError) as e:
            raise PayloadError(f"stage {src_stage} sent something else than the shapes it passes") from e
        return _StageForwardMeta(metas) if way == FORWARD else _StageBackwardMeta(metas)

    # -- checkpoints ---------------------------------------------------------------------------------------

    def reference_state(self) -> dict[str, Tensor]:
        """Return all references of both directions as plain tensors, ready for safetensors."""
        ends: dict[str, Sender | Receiver] = {f"send.{w}": s for w, s in self._senders.items()}
        ends |= {f"recv.{w}": r for w, r in self._receivers.items()}
        with self._lock:
            return {f"{name}.{k}": v for name, end in ends.items() for k, v in end.state_dict().items()}

    def load_reference_state(self, state: dict[str, Tensor]) -> None:
        """Take over what ``reference_state`` returned, at both ends of a boundary or at neither."""
        for way in (FORWARD, BACKWARD):
            self._senders[way].load_state_dict(under(state, f"send.{way}."))
            self._receivers[way].load_state_dict(under(state, f"recv.{way}."))


class _Timed:
    """Add the time spent inside to one field of a tally."""

    def __init__(self, tally: Tally, name: str) -> None:
        self._tally, self._name = tally, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self._start
        setattr(self._tally, self._name, getattr(self._tally, self._name) + spent)


def _slots(mb: int, n: int) -> list[int]:
    return list(range(mb * n, (mb + 1) * n))
