"""Blocks of whole tensors, cut to boxes: together the boxes fill what the whole tensor would."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.state.boxes import Box
from thinwire.state.loaded.copied_blocks import CopiedBlock, Strided, memory_of
from thinwire.state.loaded.cut_blocks import cut
from thinwire.types import InputError


def view(x: Tensor, data: st.DataObject) -> Tensor:
    """Return a view of a tensor, as loaders of checkpoints make them."""
    for _ in range(data.draw(st.integers(0, 3))):
        d = data.draw(st.integers(0, x.dim() - 1)) if x.dim() else 0
        kind = data.draw(st.sampled_from(["narrow", "step", "turn", "pick", "split", "flat"]))
        if not x.dim():
            continue
        if kind == "narrow":
            start = data.draw(st.integers(0, x.shape[d] - 1))
            x = x.narrow(d, start, data.draw(st.integers(1, x.shape[d] - start)))
        elif kind == "step":
            x = x[(slice(None),) * d + (slice(None, None, 2),)]
        elif kind == "turn":
            x = x.transpose(0, d)
        elif kind == "pick" and x.dim() > 1:
            x = x.select(d, x.shape[d] - 1)
        elif kind == "split" and x.shape[d] % 2 == 0:
            x = x.unflatten(d, (2, x.shape[d] // 2))
        elif kind == "flat" and x.is_contiguous():
            x = x.flatten()
    return x


def boxes(shape: tuple[int, ...], data: st.DataObject) -> list[Box]:
    """Return boxes that make up a tensor."""
    found = [Box.whole(shape)]
    for _ in range(3):
        box = found.pop(0)
        d = data.draw(st.integers(0, len(shape) - 1))
        n = data.draw(st.integers(0, box.size[d]))
        for start, size in ((0, n), (n, box.size[d] - n)):
            at, sizes = list(box.at), list(box.size)
            at[d], sizes[d] = at[d] + start, size
            found.append(Box(tuple(at), tuple(sizes), shape))
    return found


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), st.data())
def test_boxes_fill_what_a_whole_tensor_fills(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()) + 1
    source = view(whole.reshape(shape), data)
    expected = torch.zeros(3 * source.numel() + 2, dtype=torch.int64)
    target = expected[1:].as_strided(source.shape, [3 * s for s in source.contiguous().stride()])
    found = torch.zeros_like(expected)
    block = CopiedBlock(0, tuple(source.shape), Strided.of(source), Strided.of(target), memory_of(found))
    target.copy_(source)
    again = torch.zeros_like(found)
    try:
        for box in boxes(shape, data):
            own = whole.reshape(shape)[box.slices].reshape(-1).clone()
            for part in cut(block, box, 5, "w"):
                assert part.slot == 5
                part.fill(own)
                CopiedBlock(5, part.size, part.source, part.target, again).update(
                    torch.arange(own.numel()), own
                )
    except InputError as e:  # rows that are cut short and run on into the next
        assert "copies w across its dimensions" in str(e) and source.dim() < len(shape)
        return
    assert torch.equal(found, expected) and torch.equal(again, expected)


def test_a_block_that_runs_from_row_to_row_is_refused_by_name() -> None:
    memory = torch.zeros(4)
    block = CopiedBlock(0, (4,), Strided(1, (1,)), Strided(0, (1,)), memory)
    with pytest.raises(InputError, match=r"copies w across its dimensions.*publish it whole"):
        list(cut(block, Box.whole((2, 3)), 0, "w"))
