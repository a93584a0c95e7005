"""Fashion-MNIST: images of ten kinds of clothes, 60,000 to train on and 10,000 held out."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

import torch
from torch import Tensor

from thinwire.runs.data.debian import FASHION, PACKAGED
from thinwire.runs.data.task import Task
from thinwire.runs.machine.cache import cache_folder
from thinwire.types import InputError, require

SIDE, CLASSES = 28, 10
PIXELS = SIDE * SIDE
MEAN, DEVIATION = 0.286, 0.353  # of the pixels to train on, where white is 1
MAGIC = {1: 0x801, 3: 0x803}  # how a file of bytes begins, by its dimensions
REMEDY = (
    f"run `python -m thinwire.runs.models.fetch {FASHION}`, install Debian's package dataset-{FASHION}, or "
    f"put its four .gz files into {FASHION}/ of the folder that THINWIRE_DATA names"
)


def load_fashion() -> tuple[Tensor, Tensor]:
    """Return the images to train on and those held out, uint8 [N, 785]: the pixels by rows, then the class.

    ``InputError`` where they are damaged, or not in THINWIRE_DATA, in Debian's place or in the cache folder.
    """
    folder = find_fashion()
    if folder is None:
        raise InputError(f"{FASHION} is not on this machine; {REMEDY}")
    return _part(folder, "train"), _part(folder, "t10k")


def find_fashion() -> Path | None:
    """Return the folder of the images on this machine, or None."""
    root = os.environ.get("THINWIRE_DATA")
    places = [Path(root) / FASHION] if root else []
    for place in (*places, PACKAGED, cache_folder() / FASHION):
        if place.is_dir():
            return place
    return None


def _part(folder: Path, name: str) -> Tensor:
    images = _read(folder / f"{name}-images-idx3-ubyte.gz", 3)
    labels = _read(folder / f"{name}-labels-idx1-ubyte.gz", 1)
    fits = images.shape == (len(labels), SIDE, SIDE) and len(labels) > 0 and int(labels.max()) < CLASSES
    require(
        fits,
        InputError,
        f"{folder} has {name} images of shape {list(images.shape)} for {len(labels)} labels, which is not "
        f"{FASHION}; {REMEDY}",
    )
    return torch.cat((images.flatten(1), labels[:, None]), 1)


def _read(file: Path, dimensions: int) -> Tensor:
    """Return the bytes of an IDX file: a magic number, the size of each dimension, the values."""
    try:
        data = gzip.decompress(file.read_bytes())
    except (OSError, EOFError, zlib.error) as e:
        why = getattr(e, "strerror", None) or e
        raise InputError(f"{FASHION}: {file} cannot be read ({why}); {REMEDY}") from e
    words = [int.from_bytes(data[i : i + 4], "big") for i in range(0, 4 * (dimensions + 1), 4)]
    values, (magic, *shape) = data[4 * (dimensions + 1) :], words
    expected = torch.Size(shape).numel()
    require(
        magic == MAGIC[dimensions] and len(values) == expected,
        InputError,
        f"{FASHION}: {file} is damaged, with {len(values)} values for {expected}; {REMEDY}",
    )
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).reshape(shape)


def pictures(blocks: Tensor) -> Tensor:
    """Return the images [B, 1, 28, 28] of blocks [B, 785] as they are, uint8, without a copy."""
    return blocks[:, :PIXELS].unflatten(1, (1, SIDE, SIDE))


def normed(pixels: Tensor) -> Tensor:
    """Return pixels of 0 to 255 as float32, with mean 0 and deviation 1 over all images to train on."""
    return pixels.to(torch.float32, copy=True).div_(255).sub_(MEAN).div_(DEVIATION)


def inputs(blocks: Tensor) -> Tensor:
    """Return the images [B, 1, 28, 28] of blocks [B, 785], float32 with mean 0 and deviation 1 over all."""
    return normed(pictures(blocks))


def targets(blocks: Tensor) -> Tensor:
    """Return the classes [B] of blocks [B, 785].

    >>> targets(torch.tensor([[0] * 784 + [7]], dtype=torch.uint8))
    tensor([7])
    """
    return blocks[:, PIXELS].long()


IMAGES = Task(inputs, targets, PIXELS + 1, torch.uint8, (), (CLASSES,), accuracy=True)
