"""Packed models at a path: the packed file, a checkpoint of codes, or a model's folder again."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from thinwire.files.checkpoint import SUFFIX, write_checkpoint
from thinwire.replacing import replacing
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.types import InputError, require
from thinwire.uses.models.codes import code_tensors
from thinwire.uses.models.companions import is_code, is_data, weights_name
from thinwire.uses.models.container import PackedModel, write_model
from thinwire.uses.models.run.loading import Unpacked
from thinwire.uses.models.run.packing import unpacked


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


def write_unpacked(packed: PackedModel, out: Path, code: bool = False) -> Unpacked:
    """Write the tensors of a packed model, and those of its files that are of a kind which models need.

    To a folder that ``from_pretrained`` loads; to a file where ``out`` is called ``.safetensors``. Whole or
    not at all. ``code``: Python code too. Errors: ``InputError``, ``PayloadError``, ``OSError``.
    """
    tensors = unpacked(packed)
    if out.suffix == SUFFIX:
        write_checkpoint(out, tensors, {})
        return Unpacked(len(tensors), {}, [])
    files = {n: data for n, data in packed.files.items() if is_data(n) or (code and is_code(n))}
    left = [name for name in packed.files if name not in files]
    require(out.is_dir() or not out.exists(), InputError, f"{out} is a file; name a folder for the model")
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    try:
        for name, data in files.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(data)
        write_checkpoint(work / weights_name(files), tensors, {})
        work.chmod(0o755)
        if out.exists():
            _replace(out, work)
        else:
            work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Unpacked(len(tensors), files, left)


def _replace(out: Path, work: Path) -> None:
    """Put a folder in the place of another that was made the same way; refuse one that holds more."""
    names = _files_in(work)
    strange = sorted(_files_in(out) - names)
    told = f"{out} holds {strange[0] if strange else ''} besides a model; name another folder"
    require(not strange, InputError, told)
    folders = [place for name in sorted(names) if (place := out / name).is_dir()]
    require(not folders, InputError, f"{folders[:1]} is a folder, and a file is to be; name another folder")
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).replace(out / name)


def _files_in(folder: Path) -> set[str]:
    """Return the files in a folder and below it, a link to another folder among them."""
    found = (f for f in folder.rglob("*") if f.is_symlink() or not f.is_dir())
    return {f.relative_to(folder).as_posix() for f in found}
