"""A make-believe accelerator: tensors that compute on the CPU, but refuse what a GPU's would refuse.

They say that their device is ``meta``. Inside ``Elsewhere()`` an operation that mixes them with tensors of
the CPU raises, single numbers and copies from one to the other excepted, and ``numpy()`` raises as well.
So code that forgets the device fails here, on a machine without one; its numbers are the CPU's own.

``Elsewhere()`` also counts what crosses, and what a program waits for the device for::

    with Elsewhere() as seen:
        ...
    assert (seen.to_host, seen.to_device, len(seen.waits)) == (1, 0, 1)

A copy that blocks is a wait, and so are each number read (``item``, ``tolist``, ``bool``, ``int``, ``float``,
``equal``), a list as index, and an operation whose result has a size that only the device knows (``nonzero``,
a mask as index). Factories in other threads than the one that entered are not seen: let a test run its lanes
on the caller's. Autocast cannot be tried: torch does not pass it on for that device.
"""

from __future__ import annotations

import traceback
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
MAY_MIX = {"copy_", "_to_copy"}
INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_"}  # by a list: torch moves it, and waits
READ = {
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}


@dataclass
class Seen:
    """What crossed between the devices, and where the program waited for the other one."""

    to_host: int = 0
    to_device: int = 0
    waits: list[str] = field(default_factory=list)  # what each was, and the line that asked for it

    def clear(self) -> None:
        """Count from zero again."""
        self.to_host, self.to_device = 0, 0
        self.waits.clear()


_counting: list[Seen] = []  # the innermost ``Elsewhere`` last; threads share it


def waited(what: str) -> None:
    """Count a wait."""
    frames = [f for f in traceback.extract_stack() if "/thinwire/" in f.filename]
    where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "the test"
    for seen in _counting[-1:]:
        seen.waits.append(f"{what} at {where}")


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

    def item(self) -> Any:
        waited("item")
        return self.here.item()

    def tolist(self) -> Any:
        waited("tolist")
        return self.here.tolist()

    def __bool__(self) -> bool:
        waited("bool")
        return bool(self.here)

    def __int__(self) -> int:
        waited("int")
        return int(self.here)

    def __index__(self) -> int:
        waited("int")
        return self.here.__index__()

    def __float__(self) -> float:
        waited("float")
        return float(self.here)


class Making(TorchFunctionMode):
    """``torch.tensor`` of values on ``DEVICE``: made on the CPU, and moved, as on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE:
            kwargs.pop("device")
            return func(*args, **kwargs).to(DEVICE)
        return func(*args, **kwargs)


class Elsewhere(TorchDispatchMode):
    """While it is active, tensors can be made on ``DEVICE`` and moved there and back, and are counted."""

    def __enter__(self) -> Seen:  # type: ignore[override]
        super().__enter__()
        self._making = ExitStack()
        self._making.enter_context(Making())
        _counting.append(Seen())
        return _counting[-1]

    def __exit__(self, *error: Any) -> None:
        _counting.pop()
        self._making.close()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU, and say where the result is."""
    name = func.overloadpacket.__name__
    found = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    there = any(isinstance(t, There) for t in found)
    if there and name not in MAY_MIX:
        others = [t for t in found if t.dim() and not isinstance(t, There)]
        if others and not (name in INDEXED and isinstance(found[0], There) and indices_only(args, others)):
            raise RuntimeError(f"{name} of tensors on two devices")
        count_wait(name, args, others)
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]) == DEVICE
    if name in MAY_MIX:
        count_copy(name, args, kwargs, there)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": "cpu"}
    made = func(*tree_map(_here, args), **tree_map(_here, kwargs))
    in_place = name.startswith("__i") if name.endswith("__") else name.endswith("_")
    target = kwargs.get("out", args[0] if in_place else None)
    if isinstance(target, Tensor):
        return target
    return tree_map(lambda t: There(t) if isinstance(t, Tensor) else t, made) if there else made


def indices_only(args: Any, others: list[Tensor]) -> bool:
    return all(any(t is i for i in args[1]) for t in others)


def count_wait(name: str, args: Any, others: list[Tensor]) -> None:
    masked = name in INDEXED and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name in READ or masked or others or (name == "repeat_interleave" and len(args) < 2):
        waited(f"{name} by a list" if others else name)
    for seen in _counting[-1:]:
        seen.to_device += len(others)


def count_copy(name: str, args: Any, kwargs: dict[str, Any], to_there: bool) -> None:
    source, target = (args[1], isinstance(args[0], There)) if name == "copy_" else (args[0], to_there)
    if isinstance(source, There) == target or not _counting:
        return
    if target and not source.dim():
        return  # a number goes along with the command
    _counting[-1].to_device += target
    _counting[-1].to_host += not target
    if not (args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking")):
        waited("a copy that blocks")


def _here(value: Any) -> Any:
    return value.here if isinstance(value, There) else value
