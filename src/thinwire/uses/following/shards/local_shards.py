"""The shards that this process has of a sharded model: its local tensors, and the box that each is.

Here alone is asked where torch puts the shards of a DTensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinwire.state import tensor_kinds
from thinwire.state.boxes import Box, parse
from thinwire.types import InputError, require
from thinwire.uses.following.published_tensors import Names, Source, tensors_of


def is_sharded(model: nn.Module) -> bool:
    """Return whether a module has parameters of which each process has a shard."""
    tensor_kinds.reshard(model)
    return any(tensor_kinds.is_sharded(x) for x in model.parameters())


def mesh_of(source: Source) -> Any:
    """Return the device mesh of the first DTensor of a source; None where it has none."""
    found = source.parameters() if isinstance(source, nn.Module) else source.values()
    return next((cast(Any, x).device_mesh for x in found if tensor_kinds.is_sharded(x)), None)


def shards_of(source: Source, names: Names | None = None) -> dict[str, Tensor]:
    """Return this process's shard of each tensor, not copied, by the name of its box.

    A tensor that is no DTensor, or is replicated, is there whole, by its own name; a shard without elements
    is left out. ``names`` as in ``Publisher``: names of whole tensors. Nothing is sent.

    Errors: ``InputError`` for what has no box: FSDP1, ZeRO-3, partial sums, shards split in turns.
    """
    if isinstance(source, nn.Module):
        check_shaped(source)
        tensor_kinds.reshard(source)
    return dict(_shards(tensors_of(source, names)))


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, x in tensors.items():
        told = f"{name} is called as shards are here; rename it"
        require(parse(name)[1] is None, InputError, told)
        if not tensor_kinds.is_sharded(x):
            yield name, x
            continue
        with torch.no_grad():
            local = cast(Any, x).to_local().detach()
        if local.numel():
            box = box_of(name, x)
            require(local.shape == box.size, InputError, f"{name}: {_unknown(x)}")
            yield name if box == Box.whole(box.shape) else box.called(name), local


def box_of(name: str, x: Tensor) -> Box:
    """Return which box of a DTensor this process has; it has elements of it.

    Errors: ``InputError`` with its ``name`` where that is no one box.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = cast(Any, x).device_mesh, cast(Any, x).placements
    if any(isinstance(p, Partial) for p in placements):
        raise InputError(
            f"{name} is a sum of which each process has a term ({placements}); redistribute it to Shard or "
            "Replicate before it is published"
        )
    size, at = compute_local_shape_and_global_offset(x.shape, mesh, placements)
    plain = all(type(p) in (Shard, Replicate) for p in placements)
    if not plain and not _in_a_row(x, size, at):
        raise InputError(f"{name}: {_unknown(x)}")
    return Box(tuple(at), tuple(size), tuple(x.shape))


def _in_a_row(x: Tensor, size: tuple[int, ...], at: tuple[int, ...]) -> bool:
    """Return whether shards that are split in turns, as by two libraries, are a box all the same."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh, placements = cast(Any, x).device_mesh, cast(Any, x).placements
    for d in {p.dim for p in placements if hasattr(p, "dim")}:
        turned = [_along(p) if getattr(p, "dim", None) == d else Replicate() for p in placements]
        rows = torch.arange(x.shape[d], device=mesh.device_type)
        own = distribute_tensor(rows, mesh, turned, src_data_rank=None).to_local()
        expected = torch.arange(at[d], at[d] + size[d], device=own.device)
        if not torch.equal(own, expected):
            return False
    return True


def _along(placement: Any) -> Any:
    """Return a placement as it is for a tensor of that one dimension."""
    split = getattr(placement, "split_factor", None)
    return type(placement)(0) if split is None else type(placement)(0, split_factor=split)


def _unknown(x: Tensor) -> str:
    placed = cast(Any, x).placements
    return f"what a process has of it ({placed}) is no one box of the tensor; publish its full_tensor()"


def check_shaped(model: nn.Module) -> None:
    """Raise ``InputError`` where a library keeps parameters in pieces of its own, without their shapes."""
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise InputError(
            "the model is sharded by FSDP1, whose flat parameters have no shape; use fully_shard (FSDP2; "
            "fsdp_version: 2 of accelerate)"
        )
    if any(hasattr(x, "ds_id") for x in model.parameters()):
        raise InputError(
            "the model is sharded by ZeRO-3, which leaves no parameter in its shape; use fully_shard "
            "(FSDP2), or gather it on all processes and publish that from one"
        )
