"""Packed models at a path: the packed file, a checkpoint of codes, or a model's folder again."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from thinwire.assets.weights.codes import code_tensors
from thinwire.assets.weights.container import PackedModel, write_model
from thinwire.files.checkpoint import SINGLE, SUFFIX, write_checkpoint
from thinwire.lab.weights.packing import unpacked
from thinwire.replacing import replacing
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.types import InputError, require


def write_packed(packed: PackedModel, out: Path, codes: bool) -> int:
    """Write a packed model whole or not at all; return the bytes of the file."""
    if codes:
        write_checkpoint(out, code_tensors(packed), {})
    else:
        with replacing(out) as part:
            part.write_bytes(write_model(packed))
    return out.stat().st_size


def published_nbytes(packed: PackedModel) -> int:
    """Return the bytes by which ``publish`` sends the codes of a packed model to a new follower."""
    tensors = code_tensors(packed)
    history = History(Layout.of(tensors))
    history.publish(tensors)
    patch = history.patch()
    return len(patch.head()) + patch.nbytes


def write_unpacked(packed: PackedModel, out: Path) -> int:
    """Write the tensors and files of a packed model, and return how many tensors there are.

    To a folder that ``from_pretrained`` loads; to a file where ``out`` is called ``.safetensors``. Whole or
    not at all. Errors: ``InputError``, ``PayloadError``, ``OSError``.
    """
    tensors = unpacked(packed)
    if out.suffix == SUFFIX:
        write_checkpoint(out, tensors, {})
        return len(tensors)
    require(out.is_dir() or not out.exists(), InputError, f"{out} is a file; name a folder for the model")
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    try:
        for name, data in packed.files.items():
            (work / name).write_bytes(data)
        write_checkpoint(work / SINGLE, tensors, {})
        work.chmod(0o755)
        if out.exists():
            _replace(out, work)
        else:
            work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return len(tensors)


def _replace(out: Path, work: Path) -> None:
    """Put a folder in the place of another that was made the same way; refuse one that holds more."""
    strange = sorted({f.name for f in out.iterdir()} - {f.name for f in work.iterdir()})
    told = f"{out} holds {strange[0] if strange else ''} besides a model; name another folder"
    require(not strange, InputError, told)
    folders = [name for f in work.iterdir() if (name := out / f.name).is_dir()]
    require(not folders, InputError, f"{folders[:1]} is a folder, and a file is to be; name another folder")
    for file in work.iterdir():
        file.replace(out / file.name)
