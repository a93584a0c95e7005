"""A tensor that is filled later, and may be cut and reshaped, but not read, until then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from thinwire.types import InputError, require

_ABOUT = {"size", "dim", "ndimension", "numel", "stride", "is_floating_point", "is_complex", "element_size"}


class Filled:
    """Whether a tensor and the views of it have their values."""

    def __init__(self) -> None:
        self.done = False


class Later(Tensor):
    """What ``like`` returns; views of it are filled with it. Reading it too early is an ``InputError``."""

    filled: Filled

    @staticmethod
    def like(x: Tensor) -> Later:
        """Return a tensor of the shape, type and device of ``x``, without values."""
        return _marked(torch.empty_like(x), Filled())

    def fill(self, x: Tensor) -> None:
        """Give it the values of ``x``; from now on it is a tensor like any other."""
        self.filled.done = True
        self.copy_(x)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        waiting = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Later) and not x._has_values()]
        with torch._C.DisableTorchFunctionSubclass():
            versions = [x._version for x in waiting]
            made = func(*args, **(kwargs or {}))
            if not waiting:
                return made
            text = "a model's output is read before the step's other forward pass, for which mode guidance is"
            changed = versions != [x._version for x in waiting]
            plain = func.__name__ in _ABOUT or func.__name__ == "__get__"
            parts = tree_flatten(made)[0]
            kept = all(_views(x, waiting) if isinstance(x, Tensor) else plain for x in parts)
            require(kept and not changed, InputError, f"{text}; use mode gather")
            filled = waiting[0].filled
            return tree_map(lambda x: _marked(x, filled) if isinstance(x, Tensor) else x, made)

    def _has_values(self) -> bool:
        filled = self.__dict__.get("filled")
        return filled is None or filled.done


def _marked(x: Tensor, filled: Filled) -> Later:
    later = x.as_subclass(Later)
    later.filled = filled
    return later


def _views(x: Tensor, waiting: Iterable[Tensor]) -> bool:
    own = x.untyped_storage().data_ptr()
    return any(own == other.untyped_storage().data_ptr() for other in waiting)
