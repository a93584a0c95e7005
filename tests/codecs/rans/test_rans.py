"""Range-coded frames: one form whoever writes them, near the entropy, and never believed."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from each import each

from thinwire.codecs import rans
from thinwire.codecs.rans import Form, lanes, rans_calls
from thinwire.codecs.rans.grid import Grid
from thinwire.types import PayloadError

compiled = pytest.mark.skipif(
    not rans_calls.there() and shutil.which("cc") is None, reason="no C compiler when thinwire was installed"
)
# Symbols a plane, planes, symbols a lane: one lane, short last ones, many segments, a plane of one symbol.
GRIDS = [Grid(1), Grid(2), Grid(1500), Grid(300, 2, 64), Grid(4097, 1, 16), Grid(2500, 4, 8)]


def noise(n: int, mean: float, seed: int = 0) -> np.ndarray:
    """Return uint8 [n] of geometric odds, with a run of one symbol at the end."""
    found = np.minimum(np.random.default_rng(seed).geometric(1 / mean, n) - 1, 255).astype(np.uint8)
    found[n - n // 4 :] = 7
    return found


def entropy(data: np.ndarray) -> float:
    """Return the bytes that ``data`` takes by the odds of its symbols."""
    share = np.unique(data, return_counts=True)[1] / data.size
    return float(-(share * np.log2(share)).sum()) * data.size / 8


@compiled
def test_the_library_is_of_this_source() -> None:
    assert rans_calls.there(), "kernels.c changed: .venv/bin/python setup.py build_ext --inplace"


@compiled
@each("grid", GRIDS)
def test_with_a_compiler_and_without_one_bytes_are_the_same(grid: Grid) -> None:
    for mean in (1.1, 3.0, 90.0):
        data = noise(grid.n * grid.planes, mean)
        out = np.empty(3 * data.size + 600, np.uint8)
        length = rans_calls.encode(data, grid, out)
        assert length is not None and out[:length].tobytes() == lanes.encode(data, grid)
        assert rans_calls.encode(data, grid, out[: length - 1].copy()) is None
        for decode in (rans_calls.decode, lanes.decode):
            assert np.array_equal(decode(out[:length], grid), data)


@compiled
@each("grid", GRIDS[2:])
def test_bodies_that_lie_are_refused_or_decode_to_as_many_symbols(grid: Grid) -> None:
    g = np.random.default_rng(1)
    data = noise(grid.n * grid.planes, 3.0)
    body = np.frombuffer(lanes.encode(data, grid), np.uint8)
    for turn in range(40):
        wrong = body.copy()
        wrong[g.integers(len(body) if turn % 2 else min(len(body), 64), size=1 + turn % 3)] ^= 1 << turn % 8
        cut = wrong[: len(wrong) - g.integers(0, 3)].copy()
        outcomes = []
        for decode in (rans_calls.decode, lanes.decode) if turn < 8 else (rans_calls.decode,):
            try:
                found = decode(cut, grid)
                assert len(found) == len(data)
                outcomes.append(found.tobytes())
            except PayloadError:
                outcomes.append(b"")
        assert len(set(outcomes)) == 1


def test_a_frame_whose_head_lies_is_refused() -> None:
    (tagged,) = rans.compress([rans.Asked(torch.zeros(999, dtype=torch.uint8), Form(), 999, 0)])
    assert tagged is not None
    frame = tagged[1:]
    assert rans.opened(frame) == rans.Frame(Form(), 999, 3)
    for head in (b"", b"\x80", b"\x80\xff", b"\x80\x00", b"\x84\x07", b"\x50\x07", b"\x21\x07", b"\x81\x07"):
        with pytest.raises(PayloadError):
            rans.opened(torch.tensor(list(head), dtype=torch.uint8))
    with pytest.raises(PayloadError, match="cannot hold"):
        rans.decompress(frame[:3], rans.Frame(Form(), 1 << 40, 3))


@compiled
@each("mean, n", [(1.6, 1 << 20), (2.0, 1 << 18), (20.0, 1 << 18), (2.0, 1 << 15)])
def test_frames_come_near_the_entropy(mean: float, n: int) -> None:
    data = noise(n, mean)[: n - n // 4]
    (frame,) = rans.compress([rans.Asked(torch.from_numpy(data), Form(), n, 0)])
    assert frame is not None
    assert frame.numel() < 1.02 * entropy(data) + 40
