"""The kernels that range-code against numpy, to the byte.

Where there is no card, Triton's interpreter runs them, in a process of its own: once asked for, it is there
for good.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from each import each
from interpreted import passes_in_the_interpreter

from thinwire.codecs import Entropy, Uniform
from thinwire.codecs.deadzone import DeadZone
from thinwire.codecs.kernels import triton_calls
from thinwire.codecs.rans import lanes, on_card
from thinwire.codecs.rans.grid import Grid
from thinwire.types import PayloadError

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CARD = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if CARD else "cpu")
kernels = pytest.mark.skipif(
    not CARD and not INTERPRETED, reason="no CUDA GPU; the interpreter is asked below"
)
HEAD = bytes((192, 128, 255, 254, 253, 252, 7))


@pytest.fixture(autouse=True)
def at_work() -> Iterator[None]:
    with np.errstate(all="ignore"), triton_calls.interpreted() if INTERPRETED else nullcontext():
        yield


def noise(n: int, mean: float) -> np.ndarray:
    found = np.minimum(np.random.default_rng(n).geometric(1 / mean, n) - 1, 255).astype(np.uint8)
    found[n - n // 4 :] = 7
    return found


@kernels
@each("grid, mean", [(Grid(1), 2.0), (Grid(70, 2, 4), 3.0), (Grid(300, 1, 2), 1.2), (Grid(129, 1, 4), 2.0)])
def test_bytes_are_those_of_a_cpu(grid: Grid, mean: float) -> None:
    data = noise(grid.n * grid.planes, mean)
    body = lanes.encode(data, grid)
    there = torch.from_numpy(data).to(DEVICE)
    for head, room in ((HEAD, len(HEAD + body)), (HEAD[:2], len(body))):
        found, length = on_card.encode(there, grid, head, room)
        assert int(length) == len(head + body) and len(found) == room
        assert found[: int(length)].cpu().numpy().tobytes() == (head + body)[:room]
        if room >= len(head + body):
            decoded = on_card.decode(found[len(head) : int(length)], grid)
            assert torch.equal(decoded, there)


@kernels
def test_bodies_that_lie_are_refused_as_on_a_cpu() -> None:
    g, grid = np.random.default_rng(0), Grid(130, 1, 4)
    body = np.frombuffer(lanes.encode(noise(grid.n * grid.planes, 3.0), grid), np.uint8)
    for turn in range(4 if INTERPRETED else 200):
        wrong = body.copy()
        wrong[g.integers(len(body) if turn % 2 else grid.heads + 8)] ^= 1 << turn % 8
        try:
            expected = lanes.decode(wrong, grid).tobytes()
        except PayloadError:
            expected = b""
        try:
            found = on_card.decode(torch.from_numpy(wrong).to(DEVICE), grid).cpu().numpy().tobytes()
        except PayloadError:
            found = b""
        assert found == expected


@pytest.mark.skipif(not CARD, reason="no CUDA GPU")
@each("codec", [Entropy(DeadZone(step=0.977)), Entropy(DeadZone(step=3.0)), Entropy(Uniform(bits=3))])
def test_whole_messages_have_the_bytes_of_a_cpu(codec: Entropy) -> None:
    for shape in ((2, 70, 33), (3, 512, 1024)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        here, there = codec.encode(x), codec.encode(x.to(DEVICE))
        for a, b in zip(here.parts, there.parts, strict=True):
            assert torch.equal(a, b.cpu())
        assert torch.equal(codec.decode(there).cpu(), codec.decode(here))


@pytest.mark.skipif(CARD or INTERPRETED, reason="it is tried here")
def test_kernels_in_the_interpreter() -> None:
    passes_in_the_interpreter(__file__)
