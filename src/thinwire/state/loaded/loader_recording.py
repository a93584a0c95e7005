"""What a loader does with a checkpoint, found without one: it is given tensors that have no values.

Slices, splits and transposes of a tensor without values say where they are in it, so a copy of one into a
parameter says which elements go where: fused, sharded over tensor-parallel ranks, padded, under other names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thinwire.state.layout import Layout
from thinwire.state.loaded.copied_blocks import CopiedBlock, Strided, memory_of
from thinwire.types import InputError

Load = Callable[[Iterable[tuple[str, Tensor]]], object]  # as a model's ``load_weights``
aten = torch.ops.aten
_CASTS = (aten._to_copy.default, aten.clone.default, aten.contiguous.default)


def record(layout: Layout, load: Load, memories: Mapping[int, Tensor]) -> Recorded:
    """Return what ``load`` copies of the tensors of a layout into the host's ``memories`` (by storage).

    No value of the host's is changed but those that the loader fills itself, such as padding. Errors:
    ``InputError`` naming the tensor that the loader refuses, or computes with instead of copying it.
    """
    found = Recorded(layout, memories)
    try:
        found.run(load, range(len(layout.slots)))
    except Exception:
        for index in range(len(layout.slots)):  # whose fault it was
            _alone(layout, load, memories, index)
        raise
    return found


def _alone(layout: Layout, load: Load, memories: Mapping[int, Tensor], index: int) -> None:
    name = layout.slots[index].name
    try:
        Recorded(layout, memories).run(load, [index])
    except InputError:
        raise
    except Exception as e:
        why = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no more is known'}"
        raise InputError(
            f"the host's loader does not take {name} [{', '.join(map(str, layout.slots[index].shape))}] "
            f"({why:.300}); publish what its checkpoint has"
        ) from e


class Recorded:
    """The blocks that a loader copied, and how many elements it filled of each memory."""

    def __init__(self, layout: Layout, memories: Mapping[int, Tensor]) -> None:
        self.blocks: list[CopiedBlock] = []
        self.filled: list[Tensor] = []  # by the loader itself: views of the memories
        self._layout, self._memories = layout, memories

    def run(self, load: Load, slots: Iterable[int]) -> None:
        """Let the loader have tensors without values for some slots, under all of their names."""
        probes = {i: self._probe(i) for i in slots}
        aliases = [(name, i) for name, i in self._layout.index.items() if i in probes]
        with torch.no_grad(), _Watch(self, {_storage(x): i for i, x in probes.items()}):
            load((name, probes[i]) for name, i in aliases)

    def _probe(self, index: int) -> Tensor:
        slot = self._layout.slots[index]
        return torch.empty(slot.shape, dtype=slot.dtype, device="meta")

    def note(self, slot: int, source: Tensor, target: Tensor) -> None:
        """Note a copy of a part of a slot's tensor into a part of a memory."""
        name, memory = self._layout.slots[slot].name, self._memories[_storage(target)]
        wide = target.dtype == source.dtype or (target.is_floating_point() and target.element_size() > 1)
        if not wide:
            raise InputError(
                f"the host keeps {name} as {_dtype(target)}, which it quantises itself; publish it as the "
                "host keeps it, or run the host without quantisation"
            )
        sources = source.expand(target.shape)
        if sources.numel() and 0 in {
            s for s, n in zip(sources.stride(), sources.shape, strict=True) if n > 1
        }:
            raise InputError(f"the host copies elements of {name} to several places; publish it as they are")
        block = CopiedBlock(slot, tuple(target.shape), Strided.of(sources), Strided.of(target), memory)
        if block.numel:
            self.blocks.append(block)

    def refuse(self, slots: Iterable[int], what: str) -> None:
        """Raise ``InputError`` naming the tensors that the loader computes with."""
        names = " and ".join(sorted(self._layout.slots[i].name for i in slots))
        raise InputError(
            f"the host's loader does not copy {names}, it computes with it ({what}); publish it as the host "
            "keeps it, or let the host load whole checkpoints"
        )


class _Watch(TorchDispatchMode):
    """Sees each operation of a loader: copies of what it was given are noted, and not done."""

    def __init__(self, found: Recorded, probes: dict[int, int]) -> None:
        super().__init__()
        self._found, self._probes = found, probes
        self._scalar: int | None = None  # the slot whose one value was asked for

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled: torch need not load its compiler, in seconds, within a host's pause."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        given = [x for x in self._tensors(args, options) if _storage(x) in self._probes]
        if func is aten._local_scalar_dense.default and given:
            self._scalar = self._probes[_storage(given[0])]
            return 0.0
        if func is aten.fill_.Scalar and self._scalar is not None and args[0].numel() == 1:
            slot, self._scalar = self._scalar, None
            return self._copied(slot, args[0].new_empty(args[0].shape, device="meta"), args[0])
        if func is aten.copy_.default and given:
            return self._copied(self._probes[_storage(args[1])], args[1], args[0])
        if func in _CASTS and given:
            return aten.alias.default(args[0])  # another dtype or device; the values are the same
        made = func(*args, **options)
        if given:
            self._check_views(func, given, made)
        elif func in (aten.fill_.Scalar, aten.zero_.default) and self._own(args[0]):
            self._found.filled.append(args[0])
        return made

    def _copied(self, slot: int, source: Tensor, target: Tensor) -> Tensor:
        if not self._own(target):
            self._found.refuse([slot], "it copies it to memory that is no parameter's")
        self._found.note(slot, source, target)
        return target

    def _own(self, x: Tensor) -> bool:
        return _storage(x) in self._found._memories

    def _check_views(self, func: Any, given: list[Tensor], made: Any) -> None:
        """Refuse what is no view of what was given: the host would hold values that are none of it."""
        for x in self._tensors((made,), {}):
            if _storage(x) not in self._probes:
                self._found.refuse({self._probes[_storage(y)] for y in given}, str(func))

    @staticmethod
    def _tensors(args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Tensor]:
        yield from (x for x in tree_leaves((args, options)) if isinstance(x, Tensor))


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def memories(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return the memory [n] of each tensor by its storage."""
    return {_storage(x): memory_of(x) for x in tensors}


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
