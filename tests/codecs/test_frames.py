"""Frames that are coded one against the other: nearer for what is alike, and never a drift."""

from __future__ import annotations

import torch

from thinwire.codecs import FrameChain, Uniform, roundtrip


def alike(frames: int, moved: float) -> torch.Tensor:
    """Return frames [1, frames * 32, 64] of which each is the one before and a little more."""
    steps = torch.randn(frames, 32, 64, generator=torch.Generator().manual_seed(3))
    steps[1:] *= moved
    return steps.cumsum(0).reshape(1, -1, 64)


def error(codec: Uniform | FrameChain, x: torch.Tensor) -> float:
    return float((roundtrip(codec, x)[1] - x).norm() / x.norm())


def test_frames_that_are_alike_come_nearer_in_as_many_bytes() -> None:
    x, plain = alike(8, 0.1), Uniform(bits=3, group=64)
    chain = FrameChain(plain, frames=8)
    assert error(chain, x) < error(plain, x) / 2
    assert chain.encode(x).nbytes == plain.encode(x).nbytes


def test_the_last_of_many_frames_is_as_near_as_the_second() -> None:
    x = alike(64, 0.2)
    _, x_hat = roundtrip(FrameChain(Uniform(bits=4, group=64), frames=64), x)
    errors = (x_hat - x).view(64, -1).norm(dim=1)
    assert errors[-1] < 1.5 * errors[1]
