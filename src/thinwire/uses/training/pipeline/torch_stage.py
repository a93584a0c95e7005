"""All that is private to torch's pipelining, or differs between torch 2.11 and 2.15, about a stage.

A schedule must know the shapes that stages pass before it can lay out buffers. Shapes that nobody stated are
inferred, and torch then sends them from stage to stage; 2.12 and later first vote on whether all are known.
Torch would send both over its process group, and the shapes pickled. Here they go over the links, which have
encryption and deadlines. What this torch has is found by looking, not by its version:

- 2.11 infers shapes in one forward pass (``_shape_inference``), and takes no shapes of gradients. It greets
  neighbours by tensors of the stage's device, which gloo cannot send from a GPU; no stage here asks for it.
- 2.12 to 2.14 vote from stage to stage (``_warmup_*``) at each change between training and evaluation.
- 2.15 votes by an all-reduce in its schedules, one number over the process group, which no stage can replace,
  and greets neighbours in the same way as 2.11: over gloo that is done from the CPU here.

``tests/uses/training/pipeline/test_compressed_stage.py`` compares a stage with the stock one, bit by bit.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils import _pytree as pytree

from thinwire.channels import wire
from thinwire.types import WRONG_VALUES, InputError, PayloadError
from thinwire.uses.training.pipeline.choosing.pipeline_policy import BACKWARD, FORWARD

try:
    from torch.distributed.pipelining._utils import _StageBackwardMeta, _StageForwardMeta, _TensorMeta
    from torch.distributed.pipelining.stage import InferenceMode
except ImportError:  # 2.11, whose stages never ask for them
    pass

VOTE, SHAPES = b"V", b"M"  # kinds of control messages
STAGES_VOTE = hasattr(schedules.PipelineScheduleSingle, "_warmup_p2p")
STAGES_KNOW_GRADIENTS = "input_grads" in inspect.signature(PipelineStage.__init__).parameters
Row = tuple[list[int], list[int], int, bool]  # shape, stride, dtype and whether a gradient is due


def _greet_from_the_cpu() -> None:
    greet = getattr(schedules, "_preconnect_shared_p2p_edges", None)
    if greet is None:
        return

    def greeting(parent: dist.ProcessGroup, ranks: dict[int, int], device: torch.device) -> None:
        greet(parent, ranks, torch.device("cpu") if dist.get_backend(parent) == "gloo" else device)

    schedules._preconnect_shared_p2p_edges = greeting  # type: ignore[attr-defined]


_greet_from_the_cpu()


class TorchStage(PipelineStage):
    """A stage that settles shapes with its neighbours through ``post`` and ``hear`` of a subclass."""

    def __init__(
        self, submodule: nn.Module, index: int, stages: int, device: torch.device, *args: Any, **kwargs: Any
    ) -> None:
        if not STAGES_KNOW_GRADIENTS:
            kwargs = {name: x for name, x in kwargs.items() if name not in ("input_grads", "output_grads")}
        super().__init__(submodule, index, stages, device, *args, **kwargs)
        self._static: bool | None = None  # what the vote came to

    def post(self, kind: bytes, way: str, stage: int, body: bytes) -> None:
        """Send a control message to the rank of another stage."""
        raise NotImplementedError

    def hear(self, kind: bytes, way: str, stage: int, what: str) -> bytes:
        """Return the control message of another stage for this one; ``what`` is awaited."""
        raise NotImplementedError

    def is_here(self, stage: int) -> bool:
        """Return whether another stage is on this rank too."""
        return self.stage_index_to_group_rank[stage] == self.group_rank

    def rank_of(self, stage: int) -> int:
        """Return the global rank that a stage is on."""
        rank = self.stage_index_to_group_rank[stage]
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    # -- the vote of torch 2.12 to 2.14 ---------------------------------------------------------------------
    # Torch asks at each change between training and evaluation, a round trip before the first micro-batch.
    # Here it is asked once, for training: who knows its shapes then knows them in evaluation.

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        static = self._static
        if static is None:
            static = not InferenceMode.needs_dynamic(self._user_meta, True)
            if not self.is_first:
                static = self._vote(FORWARD, self.stage_index - 1, received_acc) and static
            self._pass_vote(FORWARD, self.stage_index + 1, static)
        return torch.tensor([int(static)], dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        if self._static is None:
            static = self._vote(BACKWARD, self.stage_index + (not self.is_last), received_result)
            self._pass_vote(BACKWARD, self.stage_index - 1, static)
            self._static = static
        return torch.tensor([int(self._static)], dtype=torch.int32)

    def _vote(self, way: str, source: int, known: Tensor | None) -> bool:
        if self.is_here(source):
            if known is None:
                raise InputError(f"stage {source} is on this rank too, but the schedule has no vote of it")
            return bool(known.item())
        return self.hear(VOTE, way, source, f"the start of stage {source}") == b"\1"

    def _pass_vote(self, way: str, to: int, static: bool) -> None:
        if 0 <= to < self.num_stages and not self.is_here(to):
            self.post(VOTE, way, to, bytes([static]))

    # -- the shapes that the first micro-batch showed --------------------------------------------------------

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        way = FORWARD if isinstance(meta, _StageForwardMeta) else BACKWARD
        found = meta.forward_metas if way == FORWARD else meta.backward_metas
        rows = [m and (list(m.shape), list(m.stride), wire.CODES[m.dtype], m.requires_grad) for m in found]
        self._tell_shapes(way, dst_stage, rows)

    def _recv_meta(self, src_stage: int) -> Any:
        way = FORWARD if src_stage < self.stage_index else BACKWARD
        metas = self._hear_shapes(way, src_stage, _meta)
        return _StageForwardMeta(metas) if way == FORWARD else _StageBackwardMeta(metas)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    # -- torch 2.11 ------------------------------------------------------------------------------------------

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        if not STAGES_KNOW_GRADIENTS:  # its buffers of a first evaluation would get no gradients in training
            for info in (info for infos in self.args_recv_info.values() for info in infos):
                if (buffer := getattr(info, "buffer", None)) is not None:
                    buffer.requires_grad_(True)
        return super()._prepare_backward_infra(*args, **kwargs)

    def _shape_inference(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run the stage once on zeros, as torch 2.11 asks; return shapes for a next stage on this rank."""
        before, after = self.stage_index - 1, self.stage_index + 1
        if not self.is_first and not self.is_here(before):
            args = self._hear_shapes(FORWARD, before, _blank)
        self.inputs_meta = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), args)
        zeros = pytree.tree_map_only(Tensor, lambda x: torch.zeros_like(x, device=self.device), args)
        with torch.no_grad():
            made = self.submod(*zeros, **(kwargs or {}))
        shapes = tuple(x.to("meta") for x in ((made,) if isinstance(made, Tensor) else made))
        self._configure_outputs_meta(shapes)  # type: ignore[attr-defined]  # 2.11 has it
        if self.is_last or self.is_here(after):
            return shapes
        due = [(list(x.shape), list(x.stride()), wire.CODES[x.dtype], True) for x in shapes]
        self._tell_shapes(FORWARD, after, due)
        return ()

    def _tell_shapes(self, way: str, stage: int, rows: Sequence[Row | None]) -> None:
        self.post(SHAPES, way, stage, json.dumps(rows).encode())

    def _hear_shapes(self, way: str, stage: int, make: Any) -> tuple[Any, ...]:
        data = self.hear(SHAPES, way, stage, f"the shapes that stage {stage} passes")
        try:
            return tuple(row and make(*row) for row in json.loads(data))
        except WRONG_VALUES as e:  # a RecursionError too
            raise PayloadError(f"stage {stage} sent something else than the shapes it passes") from e


def _meta(shape: list[int], stride: list[int], dtype: int, due: bool) -> Any:
    return _TensorMeta(torch.Size(shape), tuple(stride), wire.DTYPES[dtype], bool(due))


def _blank(shape: list[int], stride: list[int], dtype: int, _due: bool) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=wire.DTYPES[dtype], device="meta")
