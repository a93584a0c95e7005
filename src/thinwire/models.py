"""Language models in few bytes, in Python: pack a folder or tensors, unpack them.

>>> from thinwire import models
>>> record = models.pack("model", "model.tw", bits=3, text="calibration.txt")  # doctest: +SKIP
>>> record.packed_nbytes, record.perplexity  # doctest: +SKIP
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from thinwire.uses.models.oneshot.supernet import Configuration, Supernet
    from thinwire.uses.models.run.record import ModelRecord

__all__ = ["pack", "ship", "shipped", "supernet", "tensors", "unpack"]
PathLike = str | os.PathLike[str]


def pack(
    source: PathLike,
    out: PathLike,
    *,
    nbytes: int | None = None,
    bits: float | None = None,
    base: PathLike | None = None,
    text: str | None = None,
    device: str = "cpu",
) -> ModelRecord:
    """Pack the model at ``source`` into the file ``out``, and return what became of it.

    One target: ``nbytes`` of the file, ``bits`` a weight in memory (2 to 9), or ``base``, an earlier version
    whose plan and codes this one keeps, so that it is followed by a small patch. ``text``: a file, or the
    name of a text, by which the weights that matter are told; with it the record has a perplexity.
    ``device``: where the model reads it and is coded: auto, cpu, cuda or one card, as in cuda:1.
    Errors: ``InputError``, ``MissingExtra``, ``OSError``.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from thinwire import models
    >>> from thinwire.files.checkpoint import write_checkpoint
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_checkpoint(folder / "w.safetensors", {"w": torch.randn(64, 64)}, {})
    >>> record = models.pack(folder / "w.safetensors", folder / "w.tw", bits=6)
    >>> torch.dist(models.tensors(folder / "w.tw")["w"], torch.zeros(64, 64)) > 0
    tensor(True)
    """
    from thinwire.uses.models.run.model_folder import write_packed
    from thinwire.uses.models.run.model_packing import ModelPacking
    from thinwire.uses.models.run.model_packing import pack as packed

    job = ModelPacking(str(source), nbytes, bits, None if base is None else Path(base), text, device)
    model, record = packed(job)
    record.packed_nbytes = write_packed(model, Path(out), codes=False)
    return record


def tensors(packed: PathLike) -> dict[str, Tensor]:
    """Return the tensors that a packed model stands for, by name.

    Errors: ``InputError``, ``PayloadError``.
    """
    from thinwire.uses.models.run.model_folder import read_packed, unpacked

    return unpacked(read_packed(Path(packed)))


def unpack(packed: PathLike, out: PathLike, *, code: bool = False) -> list[str]:
    """Write a packed model as a folder that ``from_pretrained`` loads, or as a file called .safetensors.

    Python code that came along is written with ``code`` alone, pickles never. Return the names of files that
    were left out. Errors: ``InputError``, ``PayloadError``, ``OSError``.
    """
    from thinwire.uses.models.run.model_folder import read_packed, write_unpacked

    return write_unpacked(read_packed(Path(packed)), Path(out), code).left


def supernet(
    batches: Iterable[tuple[Tensor, Tensor]],
    steps: int,
    *,
    images: int = 1,
    classes: int = 10,
    channels: tuple[int, ...] = (16, 32, 64),
    seed: int = 0,
) -> Supernet:
    """Train one small image classifier at all widths of 2 to 6 bits at once, for ``steps`` of the batches.

    Batches: images [B, images, H, W] in float32, and classes [B]. ``channels``: of each residual block.
    ``ship`` then serves any budget of bytes without more training. Source: arXiv 2401.01543 (one-shot
    weight coupling), from its abstract and code. Errors: ``InputError`` for batches that end too soon.

    >>> import torch
    >>> from thinwire import models
    >>> draw = torch.Generator().manual_seed(0)
    >>> batch = torch.rand(16, 1, 8, 8, generator=draw), torch.randint(4, (16,), generator=draw)
    >>> net = models.supernet([batch] * 3, 3, classes=4, channels=(4, 8))
    >>> net(batch[0], net.uniform(3)).shape
    torch.Size([16, 4])
    """
    from thinwire.types import InputError, require
    from thinwire.uses.models.oneshot.supernet import Shape, Supernet
    from thinwire.uses.models.oneshot.supernet_training import TrainingMethod, train

    net, done = Supernet(Shape(channels=channels, images=images, classes=classes), seed), list[int]()
    train(net, batches, TrainingMethod(steps), seed, lambda step, *_: done.append(step))
    told = f"the batches ended after {len(done)} steps of {steps}; give more, or fewer steps"
    require(len(done) == steps, InputError, told)
    return net


def ship(net: Supernet, batches: Iterable[tuple[Tensor, Tensor]], out: PathLike, *, nbytes: int) -> int:
    """Choose widths for a budget, and write the network at these widths to ``out``; return the file's bytes.

    ``nbytes`` counts weights at their bits, steps and norms; entropy coding then takes off, and the file's
    header adds some kB. ``batches``: as in training; the search measures on the first, norms see all.
    Errors: ``InputError`` that names the least budget there is; ``OSError``.
    """
    from thinwire.types import InputError, require
    from thinwire.uses.models.oneshot.shipping import write_shipped
    from thinwire.uses.models.oneshot.supernet import batch_loss, costs_of, recalibrate
    from thinwire.uses.models.oneshot.width_search import Search

    seen = list(batches)
    require(bool(seen), InputError, "there are no batches to measure on; give one at least")
    widths, first = net.shape.widths, seen[0]
    cost = costs_of(net, first[0].shape[-1]).nbytes
    search = Search(widths, widths[-1], lambda c, _: batch_loss(net, c, *first), cost)
    configuration = search.within(nbytes, len(net.layers))
    recalibrate(net, configuration, [images for images, _ in seen])
    return write_shipped(net, configuration, Path(out))


def shipped(path: PathLike) -> tuple[Supernet, Configuration]:
    """Return a network that ``ship`` wrote, and its widths; ``net(images, widths)`` gives logits.

    Errors: ``InputError`` for another file, ``PayloadError`` for a damaged one.
    """
    from thinwire.uses.models.oneshot.shipping import read_shipped

    return read_shipped(Path(path))
