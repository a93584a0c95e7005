"""A model whose host filled it from a checkpoint, brought forward in place: only what changed is written."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.state.layout import PARTS, Layout
from thinwire.state.loaded.copied_blocks import CopiedBlock
from thinwire.state.loaded.filled_memory import check_filled
from thinwire.state.loaded.loader_recording import Load, memories, record
from thinwire.state.values import Place, View

MOST = 1 << 22  # changed elements of a slot that are worked on at once: an index takes 8 bytes each time
WHOLE_HERE = 256  # a slot of which more than this share changed is copied whole: in the host's memory
WHOLE_AWAY = 6  # and to a card: an element that changed crosses with 8 bytes more
Part = tuple[int, np.ndarray]


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
                for index, parts in self._changed(places).items():
                    if index not in self._always:
                        self._update(index, parts, view.slots[index].reshape(-1))
                for index in self._always:
                    _fill(self._blocks[index], view.slots[index].reshape(-1))
        self._whole = False

    def _changed(self, places: Sequence[Place]) -> dict[int, list[Part]]:
        """Return of each slot that the model has what differs: where a piece begins, and places in it."""
        pieces, found = self._layout.blocks(), dict[int, list[Part]]()
        for number, at in places:
            piece = pieces[number]
            if piece.slot in self._blocks:
                own = np.arange(piece.numel, dtype=np.int32) if at is None else at
                found.setdefault(piece.slot, []).append((piece.start, own))
        return found

    def _update(self, index: int, parts: list[Part], values: Tensor) -> None:
        """Write what differs of a slot's ``values`` [N]; all of them where that takes no longer."""
        many, blocks = sum(at.size for _, at in parts), list[CopiedBlock]()
        for block in self._blocks[index]:
            if many * (WHOLE_HERE if block.memory.is_cpu else WHOLE_AWAY) < len(values):
                blocks.append(block)
            else:
                block.fill(values)
        if blocks:
            own = np.concatenate([at.astype(np.int64) + start for start, at in parts])
            words = 2 if self._layout.slots[index].kind in PARTS else 1  # an element
            _scatter(blocks, torch.from_numpy(own if words == 1 else own // words), values)


def loaded_blocks(
    layout: Layout, model: nn.Module, load: Load, kept: Collection[str] = ()
) -> list[CopiedBlock]:
    """Return where ``load`` puts a checkpoint's tensors in ``model``, in memory and in a form of its own.

    ``load`` takes pairs of name and tensor, as ``load_weights`` of vLLM's and SGLang's models does. It is
    called once, with tensors that have no values: parameters may be fused, split over tensor-parallel ranks,
    transposed, padded or renamed, as long as the loader only copies. ``kept``: parameters, by name or shell
    pattern, that may stay as they are though nothing of the state fills them.

    Errors: ``InputError`` naming a tensor that the loader refuses, computes with or quantises; a parameter
    that nothing in the state fills, or not all of it, which would go on with old weights; or two tensors that
    the host keeps in one place.
    """
    own = dict(model.named_parameters())
    found = record(layout, load, memories([*own.values(), *model.buffers()]))
    check_filled(own, layout, found.blocks, found.filled, frozenset(kept))
    return found.blocks


def _by_slot(blocks: Sequence[CopiedBlock]) -> dict[int, list[CopiedBlock]]:
    found: dict[int, list[CopiedBlock]] = {}
    for block in blocks:
        found.setdefault(block.slot, []).append(block)
    return found


def _fill(blocks: Sequence[CopiedBlock], values: Tensor) -> None:
    for block in blocks:
        block.fill(values)


def _scatter(blocks: Sequence[CopiedBlock], at: Tensor, values: Tensor) -> None:
    """Write the elements ``at`` of a slot's values [N], which cross to a device once for all blocks there.

    Some may be there twice, of several versions: both times with the newest value.
    """
    for some in at.split(MOST):
        own = values[some]
        there = {d: (some.to(d), own.to(d)) for d in {block.memory.device for block in blocks}}
        for block in blocks:
            block.update(*there[block.memory.device])
