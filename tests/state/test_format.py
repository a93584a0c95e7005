"""What docs/state-format.md shows byte by byte is what is written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch

from thinwire.state import content
from thinwire.state.layout import Layout, Slot
from thinwire.state.patch_code.changes import Block
from thinwire.state.patches import body
from thinwire.state.patches.patch import Patch
from thinwire.state.words import Words

PAGE = Path(__file__).parents[2] / "docs" / "state-format.md"


def example() -> bytes:
    """Return the bytes of the page's example."""
    (block,) = re.findall(r"```\n(54 57 53 50.*?)```", PAGE.read_text(), re.DOTALL)
    return bytes.fromhex("".join(re.match(r"(?:[0-9a-f]{2} ?)*", line)[0] for line in block.splitlines()))


def test_the_example_of_a_patch_is_what_is_packed_and_what_is_read() -> None:
    layout = Layout((Slot("w", (100,), torch.bfloat16),))
    words = Words(layout)
    words[0][:] = 0x3F80  # ones
    at, diffs = np.array([3, 70], dtype=np.int32), np.array([1, -3], dtype=np.int16)
    before, moved = words.hash(), content.moved(at, words[0][at], words[0][at] + diffs, 0)
    packed = body.pack_changes(layout, {0: Block(100, at, diffs)}, lambda i, a, b: words[i][a:b])
    after = content.add(before, moved)
    patch = Patch(1, 2, before, after, 1.7e9, {"step": 1}, layout.digest, packed)
    assert patch.pack() == example()
    assert Patch.unpack(example()) == patch


def test_the_page_s_factors_are_those_of_the_hash() -> None:
    page = PAGE.read_text().lower()
    for value in (content.START, int(content._A[0]), int(content._B[0]), content._factor(0)):
        assert f"0x{value:x}" in page
