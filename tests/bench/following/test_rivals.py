"""What others send when a state changes is compared fairly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thinwire.state.layout import Layout


def test_the_rivals_of_states_are_lossless():
    """A way that loses words would be compared unfairly."""
    pytest.importorskip("zstandard")
    from bench.following.recording import words_of
    from bench.following.rivals import rivals

    g = torch.Generator().manual_seed(0)
    shapes = {"a": (7,), "b": (70_000,), "c": (), "d": (2, 46)}
    tensors = {n: torch.randn(s, generator=g).bfloat16().float() for n, s in shapes.items()}
    layout = Layout.of(tensors, torch.bfloat16)
    before, after = np.empty(layout.numel, np.int16), np.empty(layout.numel, np.int16)
    words_of(tensors, before)
    for x in tensors.values():
        x.copy_(torch.where(torch.rand(x.shape, generator=g) < 0.3, x * -1.5, x).bfloat16().float())
    words_of(tensors, after)
    for rival in rivals(layout):
        held = before.copy()
        rival.decode(rival.encode(tensors, before), held)
        assert np.array_equal(held, after), rival.name
