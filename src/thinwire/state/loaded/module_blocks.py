"""Where a model of a state's own names and shapes keeps it, written in place: no loader is asked."""

from __future__ import annotations

from torch import nn

from thinwire.state import binding, tensor_kinds
from thinwire.state.boxes import strides
from thinwire.state.layout import Layout
from thinwire.state.loaded.copied_blocks import CopiedBlock, Strided, memory_of
from thinwire.types import InputError


def module_blocks(layout: Layout, model: nn.Module) -> tuple[list[CopiedBlock], set[int]]:
    """Return a block for each parameter and buffer that the layout names, and the slots of buffers.

    Buffers are to be written whole each time: a model writes to its own, as batch norm does. Errors:
    ``InputError`` naming the first that does not fit, or is itself a shard.
    """
    found, buffers = list[CopiedBlock](), set[int]()
    for x, index in binding.bind(layout, model):
        slot = layout.slots[index]
        if tensor_kinds.is_sharded(x):
            raise InputError(
                f"{slot.name} is sharded in the model too; follow with a model of whole tensors, or of an "
                "engine's own parts with load_into"
            )
        source = Strided(0, strides(slot.shape))
        found.append(CopiedBlock(index, slot.shape, source, Strided.of(x), memory_of(x)))
        if not isinstance(x, nn.Parameter):
            buffers.add(index)
    return [block for block in found if block.numel], buffers
