"""Pictures as PNG files, by Pillow, which diffusers brings."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import torch
from torch import Tensor

from thinwire.replacing import replacing

STRONGER = 10.0  # times, of a difference that is drawn


def png(image: Tensor) -> bytes:
    """Return a grey picture [height, width] in 0..1 as PNG."""
    from PIL import Image

    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy(), "L").save(file, "PNG", optimize=True)
    return file.getvalue()


def save(image: Tensor, path: Path) -> None:
    """Write a picture as PNG, atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(png(image))


def inline(image: Tensor) -> str:
    """Return a picture as PNG in base64, for a page that needs no other file."""
    return base64.b64encode(png(image)).decode("ascii")


def difference(image: Tensor, reference: Tensor) -> Tensor:
    """Return a difference as a picture: grey where there is none, ``STRONGER`` times as strong."""
    return 0.5 + STRONGER * (image - reference) / 2
