"""A small convolutional network for images of 28 x 28: one stage, always from random weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from thinwire.runs.data.fashion import CLASSES, SIDE
from thinwire.seeding import seeded

CNN = "cnn-fashion"


@dataclass(frozen=True)
class CnnConfig:
    """The shape of the network, by default one of 417,482 parameters."""

    model_type: str = "cnn"
    kernel: int = 5
    channels: tuple[int, int] = (16, 32)
    width: int = 256

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, of which a digest is made."""
        return dataclasses.asdict(self)


def build_cnn(config: CnnConfig, seed: int = 0) -> nn.Sequential:
    """Return the network, images [B, 1, 28, 28] to logits [B, 10], with random weights from ``seed``.

    >>> sum(p.numel() for p in build_cnn(CnnConfig()).parameters())
    417482
    """
    first, second = config.channels
    with seeded(seed):
        return nn.Sequential(
            *_convolution(1, first, config.kernel),
            *_convolution(first, second, config.kernel),
            nn.Flatten(),
            nn.Linear(second * (SIDE // 4) ** 2, config.width),
            nn.ReLU(),
            nn.Linear(config.width, CLASSES),
        )


def _convolution(channels: int, out: int, kernel: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, out, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool2d(2)
