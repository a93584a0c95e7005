"""A model whose host filled it from a checkpoint, brought forward in place: only what changed is written."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.state.layout import PARTS, Layout
from thinwire.state.loaded.copied_blocks import CopiedBlock
from thinwire.state.loaded.loader_recording import Load, Recorded, memories, record
from thinwire.state.values import Place, View
from thinwire.types import InputError, require

MOST = 1 << 24  # changed elements of a slot that are worked on at once: an index takes 8 bytes a dimension


class LoadedModel:
    """A model in whose memory ``blocks`` of a state's tensors are: see ``loaded_blocks``.

    Slots ``always`` are written whole each time: the model writes to them itself.
    """

    def __init__(
        self,
        layout: Layout,
        model: nn.Module,
        blocks: Sequence[CopiedBlock],
        always: Collection[int] = frozenset(),
    ) -> None:
        self._model, self._layout = weakref.ref(model), layout
        self._places = [x.data_ptr() for x in model.parameters()]
        self._blocks, self._always = _by_slot(blocks), always
        self._whole = True  # nothing was written yet, or a write was cut short

    @property
    def alive(self) -> bool:
        """Whether somebody has the model still."""
        return self._model() is not None

    def of(self, model: nn.Module) -> bool:
        """Return whether this is of that model."""
        return self._model() is model

    def same(self, model: nn.Module) -> bool:
        """Return whether this is of that model, and its parameters are where they were."""
        return self.of(model) and [x.data_ptr() for x in model.parameters()] == self._places

    def point(
        self, view: View, touched: Container[int] | None = None, places: Sequence[Place] | None = None
    ) -> None:
        """Write what differs from the tensors in ``view``: in slots ``touched``, at ``places``.

        None: anywhere.
        """
        anywhere, self._whole = self._whole, True
        with torch.inference_mode():
            if anywhere or places is None:
                for index, blocks in self._blocks.items():
                    if anywhere or touched is None or index in touched or index in self._always:
                        _fill(blocks, view.slots[index].reshape(-1))
            else:
                for index, at in self._changed(places):
                    if index not in self._always:
                        _update(self._blocks[index], at, view.slots[index].reshape(-1))
                for index in self._always:
                    _fill(self._blocks[index], view.slots[index].reshape(-1))
        self._whole = False

    def _changed(self, places: Sequence[Place]) -> Iterator[tuple[int, Tensor]]:
        """Yield each slot that the model has, and the elements of it that differ: int64 [k]."""
        pieces, found = self._layout.blocks(), dict[int, list[np.ndarray]]()
        for number, at in places:
            piece = pieces[number]
            if piece.slot in self._blocks:
                own = np.arange(piece.numel) if at is None else at.astype(np.int64)
                words = 2 if self._layout.slots[piece.slot].kind in PARTS else 1  # an element
                found.setdefault(piece.slot, []).append((own + piece.start) // words)
        for index, parts in found.items():
            yield index, torch.from_numpy(np.unique(np.concatenate(parts)))


def loaded_blocks(
    layout: Layout, model: nn.Module, load: Load, kept: Collection[str] = ()
) -> list[CopiedBlock]:
    """Return where ``load`` puts a checkpoint's tensors in ``model``, in memory and in a form of its own.

    ``load`` takes pairs of name and tensor, as ``load_weights`` of vLLM's and SGLang's models does. It is
    called once, with tensors that have no values: parameters may be fused, split over tensor-parallel ranks,
    transposed, padded or renamed, as long as the loader only copies. ``kept``: parameters that may stay as
    they are though nothing of the state fills them.

    Errors: ``InputError`` naming a tensor that the loader refuses, computes with or quantises; or a parameter
    that nothing in the state fills, or not all of it: it would go on with old weights.
    """
    own = dict(model.named_parameters())
    found = record(layout, load, memories([*own.values(), *model.buffers()]))
    _check_filled(own, found, frozenset(kept))
    return found.blocks


def _by_slot(blocks: Sequence[CopiedBlock]) -> dict[int, list[CopiedBlock]]:
    found: dict[int, list[CopiedBlock]] = {}
    for block in blocks:
        found.setdefault(block.slot, []).append(block)
    return found


def _fill(blocks: Sequence[CopiedBlock], values: Tensor) -> None:
    for block in blocks:
        block.fill(values)


def _update(blocks: Sequence[CopiedBlock], at: Tensor, values: Tensor) -> None:
    """Write the elements ``at`` of a slot's values [N], which cross to a device once for all blocks there."""
    for some in at.split(MOST):
        own = values[some]
        there = {d: (some.to(d), own.to(d)) for d in {block.memory.device for block in blocks}}
        for block in blocks:
            block.update(*there[block.memory.device])


def _check_filled(own: Mapping[str, Tensor], found: Recorded, kept: frozenset[str]) -> None:
    """Raise ``InputError`` naming a parameter that is not filled, or only in part."""
    filled = dict[int, int]()
    for memory, many in _filled(found):
        filled[memory] = filled.get(memory, 0) + many
    for name, x in own.items():
        there, all_of_it = filled.get(x.untyped_storage()._cdata, 0), x.untyped_storage().nbytes()
        missing = all_of_it // x.element_size() - there
        if missing > 0 and name not in kept:
            some = (
                f"{missing:,} of {x.numel():,} values of the host's {name}" if there else f"the host's {name}"
            )
            told = f"nothing in the state fills {some}, which would stay old"
            raise InputError(f"{told}; publish what it is made of, or name it in kept=")
    unknown = kept - own.keys()
    require(
        not unknown, InputError, f"kept= names {', '.join(sorted(unknown))}, which the host does not have"
    )


def _filled(found: Recorded) -> Iterator[tuple[int, int]]:
    """Yield memories and how many elements of each were filled; what is filled twice counts twice."""
    for block in found.blocks:
        yield block.memory.untyped_storage()._cdata, block.numel
    for x in found.filled:
        yield x.untyped_storage()._cdata, x.numel()
