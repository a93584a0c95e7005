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
    from torch import Tensor

    from thinwire.uses.models.run.record import ModelRecord

__all__ = ["pack", "tensors", "unpack"]
PathLike = str | os.PathLike[str]


def pack(
    source: PathLike,
    out: PathLike,
    *,
    nbytes: int | None = None,
    bits: float | None = None,
    base: PathLike | None = None,
    text: str | None = None,
) -> ModelRecord:
    """Pack the model at ``source`` into the file ``out``, and return what became of it.

    One target: ``nbytes`` of the file, ``bits`` a weight in memory (2 to 9), or ``base``, an earlier version
    whose plan and codes this one keeps, so that it is followed by a small patch. ``text``: a file, or the
    name of a text, by which the weights that matter are told; with it the record has a perplexity.
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

    job = ModelPacking(str(source), nbytes, bits, None if base is None else Path(base), text)
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
