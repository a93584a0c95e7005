"""Load a rank's part of a transformer: its blocks, and what is around them, straight from the files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.dtypes import dtype_of
from thinwire.files.checkpoint import TensorEntry
from thinwire.files.host_memory import memory_bytes
from thinwire.links.mesh import Peer
from thinwire.types import InputError, TensorSpec, require
from thinwire.uses.pictures.absent_block import AbsentBlock, DividedModel, refuse_saving
from thinwire.uses.pictures.agreement import own_rank, refused
from thinwire.uses.pictures.context_parallel.divided.block_ranges import cut
from thinwire.uses.pictures.context_parallel.divided.transformer_folder import TransformerFolder
from thinwire.uses.pictures.diffusers_names.empty_model import (
    Model,
    check_class,
    kept_dtype,
    without_weights,
)
from thinwire.uses.pictures.diffusers_names.pipe_plans import blocks_of, pipe_plan_of
from thinwire.uses.pictures.diffusers_names.tested_version import check_host


def load_part(
    kind: type[Model],
    path: str | Path,
    peers: Mapping[int, Peer] | int,
    *,
    subfolder: str | None = None,
    variant: str | None = None,
    torch_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    shares: Sequence[float] | None = None,
) -> Model:
    """Load this rank's blocks of a transformer, and what is around them, for mode pipe.

    - ``kind``: its class, such as ``WanTransformer3DModel``; ``path``: a local folder of it, or of the
      pipeline with ``subfolder="transformer"``;
    - ``peers``: links to the other ranks; on the machine of ``over_workers``, how many workers it has;
    - ``variant``, ``torch_dtype``: as of ``from_pretrained``, whose weights they are, bit for bit;
    - ``device``: where to; nothing more than one tensor is on the host meanwhile;
    - ``shares``: how many of the blocks each rank gets, in proportion, such as ``[2, 1]``; the same on all.

    What is read is about the bytes that are kept. Blocks of other ranks are ``AbsentBlock``s::

        transformer = thinwire.load_part(WanTransformer3DModel, path, peers, subfolder="transformer")
        pipe = WanPipeline.from_pretrained(path, transformer=transformer)
        with thinwire.parallel(pipe.transformer, peers, "compact-pipe"):
            ...

    Errors: ``InputError``, one sentence, which the other ranks are told too, for a folder or class that is
    not served, shares that are none, and too little memory.
    """
    if isinstance(peers, int):
        text = f"{peers} is no number of workers; give how many there are besides this machine"
        require(peers > 0, InputError, text)
        return part_of_rank(
            kind, Path(path) / (subfolder or ""), 0, peers + 1, variant, torch_dtype, device, shares
        )
    with refused(peers, "diffusion"):
        rank, world, place = own_rank(peers), len(peers) + 1, Path(path) / (subfolder or "")
        return part_of_rank(kind, place, rank, world, variant, torch_dtype, device, shares)


def part_of_rank(
    kind: type[Model],
    place: Path,
    rank: int,
    world: int,
    variant: str | None = None,
    torch_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    shares: Sequence[float] | None = None,
) -> Model:
    """Load the blocks that ``rank`` has of ``world``; see ``load_part``."""
    check_host()
    check_class(kind)
    folder = TransformerFolder(kind, place, variant)
    dtype, to = _dtype(torch_dtype), _device(device)
    model = without_weights(kind, folder.config, dtype)
    folder.check(model.state_dict())
    part = _cut_out(model, folder, rank, world, shares)
    own = _wanted(kind, model, folder.stored.entries, dtype)
    _check_room(own, to, part)
    for name, wanted in own.items():
        _put(model, name, folder.stored[name].to(to, wanted.dtype))
    return model.to(to)


def _dtype(given: torch.dtype | None) -> torch.dtype | None:
    found = None if given is None else dtype_of(given)
    text = f"{found} is no dtype of weights; give one such as torch.bfloat16"
    require(found is None or (found.is_floating_point and found.itemsize > 1), InputError, text)
    return found


def _device(given: torch.device | str) -> torch.device:
    try:
        found = torch.device(given)
    except (RuntimeError, TypeError) as e:
        raise InputError(f"{given!r:.40} is no device; give one such as 'cuda:0'") from e
    there = found.type != "cuda" or (found.index or 0) < torch.cuda.device_count()
    require(there, InputError, f"this machine has no {found}; give another device=")
    return found


def _cut_out(
    model: nn.Module, folder: TransformerFolder, rank: int, world: int, shares: Sequence[float] | None
) -> DividedModel:
    """Leave the blocks of other ranks out of a model, and return what is left."""
    blocks, kind = blocks_of(model), type(model).__name__
    text = f"a {kind} takes weights of one block for all of its calls; load it whole"
    require(pipe_plan_of(model).divided, InputError, text)
    ranges = tuple(cut(blocks, world, shares))
    lists = dict.fromkeys(block.path.rpartition(".")[0] for block in blocks)
    part = DividedModel(rank, ranges, tuple(lists), folder.samples())
    for i, block in enumerate(blocks):
        if i not in ranges[rank]:
            owner, _, own = block.path.rpartition(".")
            setattr(model.get_submodule(owner), own, AbsentBlock(block.path, block.module, part))
    vars(model)["save_pretrained"] = partial(refuse_saving, part)
    return part


def _wanted(
    kind: type, model: nn.Module, found: Mapping[str, TensorEntry], dtype: torch.dtype | None
) -> dict[str, TensorSpec]:
    """Return shape and dtype of all that is loaded: what is no float stays as it is, if a dtype is given."""
    wanted = dict[str, TensorSpec]()
    for name, x in model.state_dict().items():
        own, stored = x.dtype, found[name].dtype
        if dtype is not None:
            own = kept_dtype(kind, name, dtype) if stored.is_floating_point else stored
        wanted[name] = TensorSpec(found[name].shape, own)
    return wanted


def _check_room(own: Mapping[str, TensorSpec], device: torch.device, part: DividedModel) -> None:
    """Raise ``InputError`` where the weights do not fit into what is free."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_bytes()[1]
    needed = sum(spec.nbytes for spec in own.values())
    text = f"rank {part.rank} needs {_mega(needed)} for {part} and what all ranks have, and {device} has "
    advice = "free; free some, give other shares=, or use more ranks"
    require(free is None or needed <= free, InputError, f"{text}{_mega(free or 0)} {advice}")


def _mega(nbytes: float) -> str:
    return f"{math.ceil(nbytes / 1e6):,} MB"


def _put(model: nn.Module, name: str, x: Tensor) -> None:
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    if own in module._parameters:  # not by its method, which another thread that builds a model has replaced
        module._parameters[own] = nn.Parameter(x, requires_grad=x.is_floating_point())
    else:
        module._buffers[own] = x
