"""Point the parameters and buffers of models at the tensors of a state."""

from __future__ import annotations

import weakref
from collections.abc import Container

from torch import Tensor, nn

from thinwire.state.layout import Layout
from thinwire.state.view import View
from thinwire.types import InputError, require


def bind(layout: Layout, model: nn.Module) -> list[tuple[Tensor, int]]:
    """Return each parameter and buffer of ``model`` that the layout names, and its slot.

    Errors: ``InputError`` naming the first that is missing or of another shape or dtype.
    """
    owned: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    owned |= dict(model.named_buffers(remove_duplicate=False))
    found: dict[int, tuple[Tensor, int]] = {}
    aliases = {name for name, _ in layout.aliases}
    for name, index in layout.index.items():
        if name in aliases and name not in owned:
            continue
        slot = layout.slots[index]
        require(
            name in owned, InputError, f"{name} is in the state but not in the model; bind the model it is of"
        )
        x = owned[name]
        got, want = (tuple(x.shape), x.dtype), (slot.shape, slot.dtype)
        require(
            got == want, InputError, f"{name} is {_text(*got)} in the model and {_text(*want)} in the state"
        )
        tied = found.setdefault(id(x), (x, index))[1]
        require(
            tied == index,
            InputError,
            f"{name} is tied in the model to {layout.slots[tied].name}, not in the state",
        )
    return list(found.values())


class Bound:
    """The tensors of all models that are to be those of a state, each as long as somebody has it."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id: the tensor, and its slot
        self._cut_short = False  # a copy failed, so that others are missing too

    def add(self, found: list[tuple[Tensor, int]]) -> None:
        """Take in what ``bind`` found, again if need be."""
        self._found = {i: (x, slot) for i, (x, slot) in self._found.items() if x() is not None}
        self._found |= {id(x): (weakref.ref(x), slot) for x, slot in found}

    def point(self, view: View, touched: Container[int] | None = None) -> None:
        """Let each tensor share the memory of its slot, or copy that to where it lives.

        Slots that are not among those ``touched`` are there already; None: any may have changed.
        """
        touched, self._cut_short = None if self._cut_short else touched, True
        for tensor, index in self._found.values():
            x, values = tensor(), view.slots[index]
            if x is None:
                continue
            if x.device == values.device:
                x.data = values
            elif touched is None or index in touched:
                _copy(x, values)
        self._cut_short = False


def _copy(x: Tensor, values: Tensor) -> None:
    x.data.copy_(values, non_blocking=True)


def _text(shape: tuple[int, ...], dtype: object) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
