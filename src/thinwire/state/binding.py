"""Models whose parameters share the memory of a state's words; their buffers have the values."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from thinwire.state import tensor_kinds
from thinwire.state.devices.crossing import Crossing
from thinwire.state.layout import Layout
from thinwire.state.loaded.adapter_names import active_adapter, is_kept, saved_name
from thinwire.state.values import Place, View
from thinwire.types import InputError, require

COMPILED = "_orig_mod."  # in the names of what torch.compile has wrapped
WRAPPED = "module."  # before those of what torch's DistributedDataParallel has


def owned(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's state dict by name, not copied, compiled or not.

    What it keeps besides tensors, of any kind, is left out. Errors: ``InputError`` for one without a shape.
    """
    found: dict[str, Tensor] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor):
            tensor_kinds.check_shaped(name, x)
            found[name.replace(COMPILED, "")] = x.detach()
    return found


def bind(layout: Layout, model: nn.Module) -> list[tuple[Tensor, int]]:
    """Return each parameter and buffer of ``model`` that the layout names, and its slot.

    Errors: ``InputError`` naming the first that is missing, of another shape, dtype or kind, or on no device.
    """
    owned = dict(_members(model))
    found: dict[int, tuple[Tensor, int]] = {}
    aliases = {name for name, _ in layout.aliases}
    for name, index in layout.index.items():
        if name in aliases and name not in owned:
            continue
        slot = layout.slots[index]
        require(
            name in owned, InputError, f"{name} is in the state but not in the model; {_other(name, owned)}"
        )
        x = owned[name]
        tensor_kinds.check_settable(name, x)
        got, want = (tuple(x.shape), x.dtype), (slot.shape, slot.dtype)
        require(
            got == want,
            InputError,
            f"{name} is {_text(*got)} in the model and {_text(*want)} in the state; "
            + _remedy(got[0] == want[0], slot.dtype),
        )
        tied = found.setdefault(id(x), (x, index))[1]
        require(
            tied == index,
            InputError,
            f"{name} is tied in the model to {layout.slots[tied].name}, not in the state; untie it, "
            "or publish a model that ties it too",
        )
    return list(found.values())


def check_filled(layout: Layout, model: nn.Module, kept: frozenset[str] = frozenset()) -> None:
    """Raise ``InputError`` naming a parameter that the state omits: it would go on with old weights.

    ``kept`` may stay: names and shell patterns. So may the base under an adapter, unless the state has some
    of it.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    filled = {id(x) for name, x in _members(model) if name in layout.index}
    adapter = active_adapter(model)
    base = {name for name in own if adapter is not None and saved_name(name, adapter) is None}
    if any(id(own[name]) in filled for name in base):
        base.clear()
    for name, x in own.items():
        if id(x) not in filled and name not in base and not is_kept(name.replace(COMPILED, ""), kept):
            raise InputError(
                f"nothing in the state fills the model's {name}, which would stay old; publish it too, or "
                "name it in kept="
            )


def _other(name: str, owned: Container[str]) -> str:
    """Return what to do where the model lacks ``name``: one of the two may be in a wrapper."""
    if name.removeprefix(WRAPPED) in owned:
        return f"{WRAPPED!r} is a wrapper's, such as DistributedDataParallel's; publish its .module"
    if WRAPPED + name in owned:
        return f"{WRAPPED!r} in the model is a wrapper's, such as DistributedDataParallel's; bind its .module"
    return "bind the model it is of"


def _remedy(alike: bool, dtype: torch.dtype) -> str:
    if alike:
        return f"convert the model with .to({dtype}), or publish in the model's dtype"
    return "bind the model it is of"


class Members:
    """The tensors of a state that a model had: it is to be bound anew where one was replaced since."""

    def __init__(self, layout: Layout, model: nn.Module) -> None:
        self._layout = layout
        self._known = [weakref.ref(x) for x in self._of(model)]

    def same(self, model: nn.Module) -> bool:
        """Return whether these are what ``model`` has; far faster than to bind it."""
        now = self._of(model)
        return len(now) == len(self._known) and all(
            ref() is x for ref, x in zip(self._known, now, strict=True)
        )

    def _of(self, model: nn.Module) -> list[Tensor]:
        return [x for name, x in _members(model) if name in self._layout.index]


def _members(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and buffer of ``model`` under each of its names, compiled or not.

    What belongs to an adapter of peft's comes also under the name that it has in peft's files, before those.
    """
    both = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    own = [(name.replace(COMPILED, ""), x) for name, x in chain(*both)]
    adapter = active_adapter(model)
    saved = [] if adapter is None else [(saved_name(name, adapter), x) for name, x in own]
    return chain(((name, x) for name, x in saved if name is not None), own)


class Bound:
    """The tensors of all models that are to be those of a state, each as long as somebody has it."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id: the tensor, and its slot
        self._unproved: set[int] = set()  # of these it was not seen yet whether they take values
        self._cut_short = False  # a copy failed, so that others are missing too

    def add(self, found: list[tuple[Tensor, int]]) -> None:
        """Take in what ``bind`` found, again if need be."""
        self._found = {i: (x, slot) for i, (x, slot) in self._found.items() if x() is not None}
        self._found |= {id(x): (weakref.ref(x), slot) for x, slot in found}
        self._unproved |= {id(x) for x, _ in found}

    def point(
        self, view: View, touched: Container[int] | None = None, places: Sequence[Place] | None = None
    ) -> None:
        """Let each parameter share the memory of its slot, or copy that to where it lives.

        Slots that are not among those ``touched`` are there already; None: any may have changed. ``places``
        are all where words did; None: anywhere. Buffers are always copied: a model may write to its own, as
        batch norm does. What is new is compared with its slot. Errors: ``InputError`` naming one that holds
        something else.
        """
        if self._cut_short:
            touched = places = None
        self._cut_short = True
        unproved, self._unproved = self._unproved, set()
        away = dict[torch.device, Crossing]()
        for tensor, index in self._found.values():
            x, values = tensor(), view.slots[index]
            if x is None:
                continue
            own, sharded, new = not isinstance(x, nn.Parameter), tensor_kinds.is_sharded(x), id(x) in unproved
            here = x.device == values.device and not sharded
            if here:
                x.data = values = _cloned(values) if own else values
            elif own or touched is None or index in touched:
                if not sharded:
                    if x.device not in away:
                        away[x.device] = Crossing(view.words.layout, view.slots, places)
                    away[x.device].add(x, index, own or new, new)
                    continue
                _copy(x, values)
            if new and not _holds(x, values):
                raise _unsettable(view, x, index)
        for crossing in away.values():
            for x, index in crossing.go():
                raise _unsettable(view, x, index)
        self._cut_short = False


def _unsettable(view: View, x: Tensor, index: int) -> InputError:
    return tensor_kinds.unsettable(view.words.layout.slots[index].name, tensor_kinds.article(x))


def _copy(x: Tensor, values: Tensor) -> None:
    shard, part = tensor_kinds.shards(x, values)
    shard.copy_(part)


def _holds(x: Tensor, values: Tensor) -> bool:
    """Return whether ``x`` has the memory of ``values``; a shard a copy of its own part."""
    if not tensor_kinds.is_sharded(x):
        return x.data_ptr() == values.data_ptr() and x.stride() == values.stride()
    x, values = tensor_kinds.shards(x, values)
    if x.shape != values.shape or x.dtype != values.dtype:
        return False
    return torch.equal(*(y.contiguous().reshape(-1).view(torch.uint8) for y in (x, values.to(x.device))))


def _cloned(values: Tensor) -> Tensor:
    with torch.inference_mode(False):  # else whoever leaves that mode could no longer write to it
        return values.clone()


def _text(shape: tuple[int, ...], dtype: object) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
