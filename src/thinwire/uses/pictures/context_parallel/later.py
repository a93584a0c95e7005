"""A tensor whose values come later: it may be cut and reshaped at once, and is awaited where it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

_ABOUT = {"size", "dim", "ndimension", "numel", "stride", "is_floating_point", "is_complex", "element_size"}
_VIEWS = {
    *("chunk", "split", "tensor_split", "unbind", "narrow", "select", "__getitem__", "movedim", "expand"),
    *("view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute"),
    *("to", "detach", "contiguous", "float", "type", "type_as", "__get__"),  # if they leave it as it is
}


class Filled:
    """What brings the values of a tensor and of all views of it, until it has."""

    def __init__(self, fill: Callable[[], None]) -> None:
        self._fill: Callable[[], None] | None = fill

    @property
    def done(self) -> bool:
        return self._fill is None

    def now(self) -> None:
        """Wait for the values, unless they are there."""
        if self._fill is not None:
            self._fill()
            self._fill = None


class Later(Tensor):
    """What ``like`` returns; views of it get their values with it."""

    filled: Filled

    @staticmethod
    def all_like(xs: Sequence[Tensor], values: Callable[[], Sequence[Tensor]]) -> list[Later]:
        """Return tensors of the shapes, types and devices of ``xs``, with ``values()`` once one is read."""
        empty = [torch.empty_like(x) for x in xs]

        def fill() -> None:
            for x, value in zip(empty, values(), strict=True):
                x.copy_(value)

        filled = Filled(fill)
        return [_marked(x, filled) for x in empty]

    def fill(self) -> None:
        """Let it have its values; from now on it is a tensor like any other."""
        self.filled.now()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = tree_flatten((args, kwargs))[0]
        waiting = [x for x in given if isinstance(x, Later) and not x._has_values()]
        with torch._C.DisableTorchFunctionSubclass():
            name = func.__name__
            if waiting and name in _ABOUT:
                return func(*args, **(kwargs or {}))
            if waiting and name in _VIEWS:
                made = func(*args, **(kwargs or {}))
                parts = [x for x in tree_flatten(made)[0] if isinstance(x, Tensor)]
                if all(_views(x, waiting) for x in parts):
                    filled = waiting[0].filled
                    return tree_map(lambda x: _marked(x, filled) if isinstance(x, Tensor) else x, made)
            for x in waiting:
                x.fill()
            return func(*args, **(kwargs or {}))

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
