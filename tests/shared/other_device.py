"""A make-believe accelerator: tensors that compute on the CPU, but refuse what a GPU's would refuse.

They say that their device is ``meta``. Inside ``Elsewhere()`` an operation that mixes them with tensors of
the CPU raises, single numbers and copies from one to the other excepted, and ``numpy()`` raises as well.
So code that forgets the device fails here, on a machine without one; its numbers are the CPU's own. What
torch does not pass on for that device cannot be tried: ``item``, ``tolist``, a list as index, autocast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
MAY_MIX = {"copy_", "_to_copy"}


class There(Tensor):
    """A tensor of the accelerator; ``here`` are its values."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> There:
        made: There = Tensor._make_wrapper_subclass(
            cls, here.shape, here.stride(), here.storage_offset(), dtype=here.dtype, device=DEVICE
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Elsewhere(TorchDispatchMode):
    """While it is active, tensors can be made on ``DEVICE`` and moved there and back."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU, and say where the result is."""
    name = func.overloadpacket.__name__
    found = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    there = any(isinstance(t, There) for t in found)
    if there and name not in MAY_MIX and any(t.dim() and not isinstance(t, There) for t in found):
        raise RuntimeError(f"{name} of tensors on two devices")
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]) == DEVICE
        kwargs = {**kwargs, "device": "cpu"}
    made = func(*tree_map(_here, args), **tree_map(_here, kwargs))
    in_place = name.startswith("__i") if name.endswith("__") else name.endswith("_")
    target = kwargs.get("out", args[0] if in_place else None)
    if isinstance(target, Tensor):
        return target
    return tree_map(lambda t: There(t) if isinstance(t, Tensor) else t, made) if there else made


def _here(value: Any) -> Any:
    return value.here if isinstance(value, There) else value
