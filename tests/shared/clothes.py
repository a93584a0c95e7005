"""Files in the form of Fashion-MNIST's, with a few images that a network learns at once."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import Tensor


def idx(values: Tensor) -> bytes:
    """Return bytes in the IDX format."""
    head = (0x800 + values.dim(), *values.shape)
    return b"".join(n.to_bytes(4, "big") for n in head) + values.numpy().tobytes()


def write_clothes(root: Path, **images: int) -> Path:
    """Write the four files into ``root``/fashion-mnist, and return that; ``train=64, t10k=32`` images.

    A class is two bright rows of an image, at a place of its own.
    """
    folder = root / "fashion-mnist"
    folder.mkdir(parents=True)
    for part, n in images.items():
        labels = torch.arange(n, dtype=torch.uint8) % 10
        pixels = torch.randint(0, 60, (n, 28, 28), generator=torch.Generator().manual_seed(n)).to(torch.uint8)
        for k, label in enumerate(labels.tolist()):
            pixels[k, 2 * label + 4 : 2 * label + 6] = 250
        for name, values in ((f"{part}-images-idx3", pixels), (f"{part}-labels-idx1", labels)):
            (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(idx(values)))
    return folder
