"""Compressed pipeline stages: a drop-in for ``torch.distributed.pipelining.PipelineStage``.

``get_*_ops`` return no operations, because packets travel over thinwire's own links. ``*_one_chunk`` first
land what the link brought in the buffer that the schedule is about to read. The schedules stay untouched.
What is private to torch is in ``torch_stage.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

from thinwire.channels.channel import Scheme, row_ids, sample_ids
from thinwire.channels.memory import NoMemory
from thinwire.channels.references import Store, TensorStore
from thinwire.types import InputError
from thinwire.uses.training.pipeline.boundary import (
    Incoming,
    Neighbour,
    Outgoing,
    SecondsIn,
    StageTally,
    announce,
    announced,
    slots,
)
from thinwire.uses.training.pipeline.choosing.pipeline_policy import BACKWARD, FORWARD, Choice
from thinwire.uses.training.pipeline.torch_stage import TorchStage

WAYS = (FORWARD, BACKWARD)
CONTROL = struct.Struct("<ccH")  # kind, direction, destination stage
NEXT = struct.Struct("<cH")  # b"A", destination stage; body: ids u64 of the samples of the next step


class Schemes(Protocol):
    """What a recipe says: a scheme for activations (forward) and one for gradients (backward)."""

    @property
    def schemes(self) -> Mapping[str, Scheme]: ...


class CompressedStage(TorchStage):
    """A pipeline stage that sends compressed changes to its neighbours instead of tensors.

    It takes all arguments of ``PipelineStage``, and by keyword:

    - ``peers``: the connected peers by global rank;
    - ``recipe``: the schemes of both directions;
    - ``deadline``: a wait on a neighbour fails after so many seconds without any data;
    - ``store``: makes the stores of references (default: in memory; ``DiskStore`` for more than fits there);
    - ``overlap``: encode and decode on threads of their own, beside the compute; on a GPU also on streams
      of their own;
    - ``on_samples``: called with the sample ids of a micro-batch before its forward pass in training.

    Before each ``schedule.step`` call ``begin(ids, microbatches)`` on the first stage. References are kept by
    these sample ids; later stages read them from the packets. Call ``end`` after each step before you read
    ``tally``, and ``close`` at the end. ``follow`` changes the codecs of a direction between two packets.
    Evaluation (``schedule.eval``) sends plain values and touches no reference.

    Errors: ``LinkError`` naming the neighbour that is gone or late; ``PayloadError`` for a packet that does
    not fit; ``InputError`` if the recipe keeps references by sample and no ids were given.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *args: Any,
        peers: Mapping[int, Neighbour],
        recipe: Schemes,
        deadline: float = 60.0,
        store: Callable[[], Store] = TensorStore,
        overlap: bool = False,
        on_samples: Callable[[Sequence[int]], None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, *args, **kwargs)
        self._check_neighbours(peers)
        self._on_samples = on_samples
        self.tally = StageTally()
        self._peers, self._deadline = peers, deadline
        schemes = recipe.schemes
        self._out = {
            way: Outgoing(way, stage_index, schemes[way], store(), self.tally, overlap) for way in WAYS
        }
        self._in = {way: Incoming(way, stage_index, store(), self.tally, deadline, overlap) for way in WAYS}
        # Either direction's: the ids that go out with the activations come back as keys of the gradients.
        self._by_sample = any(
            s.memory.key == "sample" and not isinstance(s.memory, NoMemory) for s in schemes.values()
        )
        self._ids: dict[int, list[int]] = {}
        self._listen()

    def begin(
        self, ids: Tensor | Sequence[int], microbatches: int, upcoming: Tensor | Sequence[int] = ()
    ) -> None:
        """Name the samples of the coming step's batch, in order, before it is cut into micro-batches.

        ``upcoming``: the samples of the step after it. Every stage may read their references ahead from disk.
        """
        if microbatches < 1 or len(ids) % microbatches:
            raise InputError(f"{len(ids)} sample ids do not divide into {microbatches} micro-batches")
        size = len(ids) // microbatches
        self._ids = {m: row_ids(ids[m * size : (m + 1) * size], size) for m in range(microbatches)}
        if self._by_sample and len(upcoming):
            self._prefetch(sample_ids(upcoming))

    def end(self) -> None:
        """Wait until all packets of this step are encoded and posted; raise the error of any that failed."""
        for out in self._out.values():
            out.settle()

    def follow(self, way: str, choice: Choice | None) -> None:
        """Send ``way``, forward or backward, by ``choice`` from the next packet on; None: by the recipe."""
        self._out[way].choice = choice

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
        if self._on_samples is not None and self.has_backward:
            self._on_samples(self._ids.get(fwd_chunk_id, ()))
        with SecondsIn(self.tally, "compute_s"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._land(BACKWARD, bwd_chunk_id)
        with SecondsIn(self.tally, "compute_s"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    # -- sending and receiving ------------------------------------------------------------------------------

    def _send_all(self, ops: list[dist.P2POp], way: str, mb: int) -> list[dist.P2POp]:
        self._only_one(ops)
        for op in ops:
            ids = self._ids_of(mb, len(op.tensor))
            self._out[way].send(self._peers[op.peer], mb, op.tensor, ids, training=self.has_backward)
        return []

    def _only_one(self, ops: list[dist.P2POp]) -> None:
        if len(ops) > 1:
            raise InputError(
                f"stage {self.stage_index} passes {len(ops)} tensors; let it pass one, the hidden state"
            )
        if any(not op.tensor.dim() for op in ops):
            raise InputError(
                f"stage {self.stage_index} passes a single number; let it pass a row for each sample"
            )

    def _ids_of(self, mb: int, n: int) -> list[int]:
        # The first stage's ids are used once, so that a forgotten begin() cannot pass for the last step's.
        ids = self._ids.pop(mb, None) if self.is_first else self._ids.get(mb)
        if ids is not None:
            return ids
        if self.has_backward and self._by_sample:
            raise InputError(
                "this recipe keeps references by sample: call stage.begin(ids, n) before each step"
            )
        return slots(mb, n)

    def _await_all(self, ops: list[dist.P2POp], way: str, mb: int) -> list[dist.P2POp]:
        self._only_one(ops)
        for op in ops:
            self._in[way].expect(mb, op.tensor, self._peers[op.peer])
        return []

    def _land(self, way: str, mb: int) -> None:
        """Wait for a packet and decode it into the schedule's buffer; at the pipeline's ends do nothing."""
        ids = self._in[way].land(mb, more=self.chunks is not None and mb + 1 < self.chunks)
        if way == FORWARD and ids is not None:
            self._ids[mb] = ids

    def _check_neighbours(self, peers: Mapping[int, Neighbour]) -> None:
        for stage in (self.stage_index - 1, self.stage_index + 1):
            if 0 <= stage < self.num_stages and not self.is_here(stage):
                rank = self.rank_of(stage)
                if rank not in peers:
                    raise InputError(
                        f"stage {self.stage_index} needs rank {rank}, where stage {stage} is, "
                        f"among its peers, which are {sorted(peers)}"
                    )

    def _neighbour(self, stage: int) -> Neighbour | None:
        if not 0 <= stage < self.num_stages:
            return None
        return self._peers.get(self.rank_of(stage))

    def _listen(self) -> None:
        """Answer what neighbours ask beside the schedule: keyframes, and references of the next samples."""
        before, after = self._neighbour(self.stage_index - 1), self._neighbour(self.stage_index + 1)
        for way, peer in ((FORWARD, after), (BACKWARD, before)):
            if peer is not None:
                self._out[way].serve_resyncs(peer)
        if before is not None and self._by_sample:
            tag = NEXT.pack(b"A", self.stage_index)
            before.mailbox.on(tag, lambda _tag, body: self._prefetch(announced(body)))

    def _prefetch(self, ids: list[int]) -> None:
        for way in WAYS:
            self._out[way].sender.prefetch(ids)
            self._in[way].receiver.prefetch(ids)
        after = self._neighbour(self.stage_index + 1)
        if after is not None:
            announce(after, NEXT.pack(b"A", self.stage_index + 1), ids)

    # -- what stages settle before the first micro-batch -----------------------------------------------------

    def post(self, kind: bytes, way: str, stage: int, body: bytes) -> None:
        """Send a control message to the rank of another stage."""
        tag = CONTROL.pack(kind, way[0].encode(), stage)
        self._peers[self.rank_of(stage)].mailbox.send(tag, body, "control")

    def hear(self, kind: bytes, way: str, stage: int, what: str) -> bytes:
        """Return the control message of another stage for this one; ``what`` is awaited."""
        tag = CONTROL.pack(kind, way[0].encode(), self.stage_index)
        return self._peers[self.rank_of(stage)].get(tag, self._deadline, what)

    # -- checkpoints ---------------------------------------------------------------------------------------

    def reference_states(self) -> dict[str, Iterator[dict[str, Tensor]]]:
        """Return iterators over all references, by end: send or recv, forward or backward."""
        ends = {f"send.{way}": out.states() for way, out in self._out.items()}
        return ends | {f"recv.{way}": end.states() for way, end in self._in.items()}

    def load_reference_states(self, ends: Mapping[str, Iterable[Mapping[str, Tensor]]]) -> None:
        """Load what ``reference_states`` returned. Do so at both ends of a boundary, or at neither."""
        for way in WAYS:
            self._out[way].sender.load_states(ends[f"send.{way}"])
            self._in[way].receiver.load_states(ends[f"recv.{way}"])

    def close(self) -> None:
        """End the threads and free the references. The stage cannot be used again. Safe to call twice."""
        for way in WAYS:
            self._out[way].close()
            self._in[way].close()


class ScheduleEager1F1B(Schedule1F1B):
    """1F1B whose stages, all but the last, run forward passes as soon as there is something to run.

    Torch's 1F1B lets a stage run ahead by the number of stages that follow it, so over a far link it stalls
    for a round trip with every micro-batch. Here only the first activations' way forth and the last
    gradients' way back stay visible. Every stage does its backward passes in the same order, so results are
    bit-equal; the price is memory, the activations of all micro-batches, as with GPipe.
    """

    def __init__(self, stage: CompressedStage, n_microbatches: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(stage, n_microbatches, *args, **kwargs)
        if not stage.is_last:
            # Read by torch for one purpose here: a stage warms up with min(micro-batches, this - its index).
            self._num_stages = stage.stage_index + n_microbatches
