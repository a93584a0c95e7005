"""A state on the card: 1.2 G float32 values published as bfloat16, and a follower on the same machine."""

from __future__ import annotations

import time

import torch
from torch import nn

import thinwire
from bench.gpu.ranks import row, wait
from thinwire.state import native

LAYERS, WIDTH, ROWS = 28, 1536, 150_000
CHANGE = 1e-6  # of a value, each step: what a small learning rate does
STEPS = 3


def measure(device: torch.device, smoke: bool) -> None:
    """Print a row a version: seconds to publish it, and until a follower and a model there have it.

    ``came_s`` is from a patch's first byte to its last; ``compiled``: whether the compiled passes are there,
    without which a state is coded four times as slowly.
    """
    torch.manual_seed(0)
    tensors = _tensors(device, *((2, 64, 512) if smoke else (LAYERS, WIDTH, ROWS)))
    values = sum(x.numel() for x in tensors.values())
    for place in dict.fromkeys(("cpu", device.type)):
        _follow(tensors, values, device, place)


def _follow(tensors: dict[str, torch.Tensor], values: int, device: torch.device, place: str) -> None:
    publisher = thinwire.Publisher(tensors, dtype=torch.bfloat16)
    into = nn.Module()
    for name, x in tensors.items():
        weights = torch.zeros_like(x, dtype=torch.bfloat16, device=place)
        into.register_parameter(name, nn.Parameter(weights, requires_grad=False))  # a buffer is copied whole
    follower = thinwire.Follower("127.0.0.1", publisher.port)
    try:
        for version in range(STEPS + 1):
            for x in tensors.values() if version else ():
                x.add_(torch.randn_like(x), alpha=CHANGE)
            wait(device)
            before, start = publisher.sent, time.perf_counter()
            number = publisher.publish(version).number
            published = time.perf_counter() - start
            follower.wait(number, 60.0)
            held, came = time.perf_counter() - start, follower.arrivals[-1].seconds
            follower.apply_to(into)
            wait(device)
            followed, sent = time.perf_counter() - start, publisher.sent - before
            row(
                follower=place, version=version, values=values, publish_s=round(published, 3),
                came_s=round(came, 3), held_s=round(held, 3), followed_s=round(followed, 3),
                nbytes=sent, state_bytes=2 * values, compiled=native.there(),
            )  # fmt: skip
    finally:
        follower.close()
        publisher.close()


def _tensors(device: torch.device, layers: int, width: int, rows: int) -> dict[str, torch.Tensor]:
    shapes = {
        "q": (width, width), "k": (width // 4, width), "v": (width // 4, width), "o": (width, width),
        "gate": (width * 4, width), "up": (width * 4, width), "down": (width, width * 4),
    }  # fmt: skip
    found = {"embedding": torch.randn((rows, width), device=device) * 0.02}
    for layer in range(layers):
        found |= {f"{layer}_{k}": torch.randn(s, device=device) * 0.02 for k, s in shapes.items()}
    return found
