"""Packed models at a path: the packed file, a checkpoint of codes, or a model's folder again."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from thinwire.files.checkpoint import SUFFIX, read_checkpoint, write_checkpoint
from thinwire.replacing import replacing
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.types import InputError, PayloadError, require
from thinwire.uses.models.codes import code_tensors, from_code_tensors, is_codes
from thinwire.uses.models.companions import (
    ADAPTER,
    CONFIG,
    is_code,
    is_data,
    settings_in,
    wants_code,
    weights_name,
)
from thinwire.uses.models.entry import unpack_entry
from thinwire.uses.models.packed_model import PackedModel, is_model, read_model, write_model
from thinwire.uses.models.tensors import Tied


def unpacked(packed: PackedModel) -> dict[str, Tensor]:
    """Return all tensors of a packed model; tied ones are one tensor. Errors: ``PayloadError``."""
    coded = {name: unpack_entry(entry, name) for name, entry in packed.entries.items()}
    own = {name: c.decoded() for name, c in coded.items() if not isinstance(c, Tied)}
    return {name: own[c.name] if isinstance(c, Tied) else own[name] for name, c in coded.items()}


def read_packed(path: Path) -> PackedModel:
    """Return the packed model at a path: a packed file, or a checkpoint of codes.

    Errors: ``InputError`` for what is none, ``PayloadError`` for what is damaged.
    """
    require(path.exists(), InputError, f"{path} is not there; give what thinwire pack wrote of a model")
    try:
        if path.is_file() and is_model(_head(path)):
            return read_model(path.read_bytes())
        tensors = read_checkpoint(path)
        told = f"{path} is no packed model; give what thinwire pack wrote of one"
        require(is_codes(tensors), InputError, told)
        return from_code_tensors(tensors)
    except PayloadError as e:
        raise PayloadError(f"{path}: {e}") from e


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(256)


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


NAMED = 6  # files that are named of many


class Unpacked(NamedTuple):
    """What was written of a packed model: how many tensors, which other files, and which were not."""

    tensors: int
    files: dict[str, bytes]
    left: list[str]


def loads_as(made: Unpacked) -> str:
    """Return a clause on what loads a model, an empty one where its files do not say.

    >>> loads_as(Unpacked(4, {"config.json": b'{"_class_name": "UNet2DModel"}'}, []))
    ', which diffusers loads as UNet2DModel'
    """
    about = settings_in(made.files, CONFIG)
    if ADAPTER in made.files:
        base = settings_in(made.files, ADAPTER).get("base_model_name_or_path")
        return f", an adapter that peft loads onto {base!s:.99}" if base else ", an adapter"
    if isinstance(about.get("_class_name"), str):
        return f", which diffusers loads as {about['_class_name']:.99}"
    if "auto_map" in about and not _is_known(about):
        if any(map(is_code, made.files)):
            return ", which transformers loads with trust_remote_code=True alone: read its code first"
        return ", which transformers does not load without the model's own code"
    return f", which transformers loads as {about['architectures'][0]}" if _is_known(about) else ""


def _is_known(about: Mapping[str, object]) -> bool:
    """Say whether transformers has the class that a config names, for models of its type."""
    if importlib.util.find_spec("transformers") is None:
        return False
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    named = about.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return (
        isinstance(first, str)
        and about.get("model_type") in CONFIG_MAPPING_NAMES
        and isinstance(getattr(transformers, first, None), type)
    )


def told_of_left(left: list[str]) -> Iterator[str]:
    """Yield a sentence on code that was not written, and one on files that are no part of a model."""
    code = [name for name in left if is_code(name)]
    other = [name for name in left if not is_code(name)]
    if code:
        yield f"{listed(code)}: code, which whoever packed it chose; --allow-code writes it, read it first"
    if other:
        yield f"{listed(other)}: left out, of no kind that a model needs"


def listed(names: list[str]) -> str:
    """Return names in a row, of many the first few and how many more there are.

    >>> listed(["a", "b"])
    'a, b'
    """
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def told_of_code(files: Mapping[str, bytes]) -> list[str]:
    """Return a sentence on code that goes along with a model that has some of its own."""
    if not wants_code(files):
        return []
    code = sorted(filter(is_code, files))
    if code:
        return [f"{listed(code)}: the model's own code, which unpack writes with --allow-code alone"]
    return ["its auto_map names classes of the model's own whose code is not in its folder"]
