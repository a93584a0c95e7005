"""Kinds of tensors: plain ones, which a state is made of, and DTensors, of which each process has a shard."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from thinwire.types import InputError

_PLAIN = {Tensor, nn.Parameter}


def check_dense(name: str, x: object) -> None:
    """Raise ``InputError`` for what is no plain tensor with values of its own."""
    if isinstance(x, Tensor):
        check_shaped(name, x)
    if odd := _odd(x):
        raise InputError(
            f"{name}: a state is made of dense tensors that hold values, not of {odd}; give a plain tensor, "
            "such as int_repr() of a quantized one or full_tensor() of a DTensor, or use a ShardPublisher"
        )


def check_shaped(name: str, x: Tensor) -> None:
    """Raise ``InputError`` for a parameter or buffer whose shape torch does not know yet."""
    if is_lazy(x):
        raise InputError(f"{name} is lazy and has no shape yet; run one batch through the model first")


def check_settable(name: str, x: Tensor) -> None:
    """Raise ``InputError`` for a parameter or buffer of a model to which no values can be given."""
    check_shaped(name, x)
    if x.is_meta:
        raise InputError(f"{name} is on the meta device; give the model memory first: to_empty(device=...)")
    if (odd := _odd(x)) and not is_sharded(x):
        raise unsettable(name, odd)


def unsettable(name: str, what: str) -> InputError:
    """Return the error for a parameter or buffer that does not take values."""
    return InputError(f"{name} is {what} in the model and takes no values; bind a model of plain tensors")


def article(x: Tensor) -> str:
    """Return what a tensor is, for messages: ``a DTensor``."""
    return f"a {type(x).__name__}"


def _odd(x: object) -> str | None:
    """Return what ``x`` is where it is not a plain tensor; None for one."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    wraps = type(x) not in _PLAIN and type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if wraps:  # its operations are its own, and so is where its values are
        return article(x)
    if x.is_quantized:
        return "a quantized tensor, whose scale is not in it"
    if x.is_nested:
        return "a nested tensor"
    return f"a tensor of {x.layout} on {x.device}" if x.layout != torch.strided or x.is_meta else None


def is_sharded(x: Tensor) -> bool:
    """Return whether ``x`` is a DTensor."""
    if type(x) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # who has one has imported it
    return module is not None and isinstance(x, module.DTensor)


def shards(x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return this process's shard of a DTensor, its own memory, and what of ``values`` belongs there.

    Nothing is sent: each process takes its own part of values that all have.
    """
    from torch.distributed.tensor import distribute_tensor

    own = cast(Any, x)
    part = distribute_tensor(values, own.device_mesh, own.placements, src_data_rank=None)
    with torch.no_grad():
        return own.to_local().detach(), part.to_local()


def reshard(model: nn.Module) -> None:
    """Let what ``fully_shard`` has wrapped hold its shards: after a forward it may hold gathered copies."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
