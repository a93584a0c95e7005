"""Checkpoints on disk: safetensors files and folders of them, read whole and written whole.

Files are read into memory, not mapped: whoever writes the next checkpoint over a mapped one would change the
tensors under a reader, or end its process.
"""

from __future__ import annotations

import json
import math
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from thinwire.dtypes import dtype_of, name_of
from thinwire.files.lfs import HEAD, MEANING, check_fetched
from thinwire.replacing import replacing, sweep
from thinwire.state.disk.tensor_header import (
    KINDS,
    METADATA,
    MOST,
    NAMES,
    PACKED,
    PREFIX,
    end_of,
    fields,
    header,
    ordered,
)
from thinwire.state.layout import MOST_NBYTES, WORDS, Array, Layout, Slot, itemsize
from thinwire.state.values import Bits
from thinwire.state.words import imprint
from thinwire.types import WRONG_VALUES, InputError, PayloadError, require

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"
STEP, SHARD = re.compile(r"checkpoint-(\d+)"), "-of-"  # how a Trainer calls its folders, and parts of a model
PART = re.compile(rf"(.*)-\d+{SHARD}(\d+){re.escape(SUFFIX)}")
HASH, VERSION = "thinwire.hash", "thinwire.version"  # notes of a version
IMPRINT = "thinwire.imprint"  # and of what the file holds


if TYPE_CHECKING:  # bits are read and written without torch
    import torch
    from torch import Tensor


class TensorEntry(NamedTuple):
    """A tensor in a file: its dtype's name and its shape, and where its bytes are behind the header."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype as torch has it."""
        return dtype_of(self.kind)


def files_of(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: a file, or a folder as transformers and peft write it.

    Of a Trainer's folder of checkpoints, those of the newest.
    Errors: ``InputError`` where there is none.
    """
    if path.is_file():
        return [path]
    require(path.is_dir(), InputError, f"{path} is not there; give a safetensors file or a model's folder")
    path = folder_of(path)
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    named = weight_map(path)
    if named is not None:
        return [path / Path(name).name for name in sorted(set(named.values()))]
    found = sorted(path.glob(f"*{SUFFIX}"))
    require(bool(found), InputError, f"{path} has no safetensors file; save the model with save_pretrained")
    _check_parts(path, found)
    return found


def _check_parts(folder: Path, files: list[Path]) -> None:
    """Raise ``InputError`` where no index is there yet, and only some of a model's parts are."""
    parts = Counter(match.groups() for file in files if (match := PART.fullmatch(file.name)))
    for (name, count), here in parts.items():
        told = f"{folder} has {here} of the {int(count)} parts of {name}; save or fetch the model again"
        require(here >= int(count), InputError, told)


def folder_of(path: Path) -> Path:
    """Return where the model of a folder is: there, or in the last whole ``checkpoint-N`` of a Trainer's.

    A model of the folder's own counts first, as for ``from_pretrained``.
    """
    if not path.is_dir() or (path / INDEX).is_file() or any(path.glob(f"*{SUFFIX}")):
        return path
    steps = {int(found[1]): file for file in path.iterdir() if (found := STEP.fullmatch(file.name))}
    return next((steps[n] for n in sorted(steps, reverse=True) if _is_whole(steps[n])), path)


def _is_whole(folder: Path) -> bool:
    """Return whether all files of a checkpoint are there: an index is written after what it names."""
    try:
        named = weight_map(folder)
    except InputError:  # it is just being written
        return False
    if named is not None:
        return all((folder / Path(name).name).is_file() for name in named.values())
    alone = (folder / SINGLE).is_file()
    return alone or any(SHARD not in file.name for file in folder.glob(f"*{SUFFIX}"))


def weight_map(folder: Path) -> dict[str, str] | None:
    """Return tensor -> file by the index of a folder; None without one, or beside a single file.

    That one counts, as for ``from_pretrained``: saving one file leaves an old index where it is.
    Errors: ``InputError``.
    """
    index = folder / INDEX
    return None if (folder / SINGLE).is_file() or not index.is_file() else read_index(index)


def read_index(index: Path) -> dict[str, str]:
    """Return tensor -> file, as an index says it. Errors: ``InputError``."""
    check_fetched([index])
    try:
        return {str(k): str(v) for k, v in json.loads(index.read_text("utf-8"))["weight_map"].items()}
    except WRONG_VALUES as e:
        raise InputError(f"{index} is not a safetensors index; save or fetch the model again") from e


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by name. Errors: ``InputError`` naming the file, ``OSError``."""
    from thinwire.state.devices.tensor_words import tensor_of

    return {name: tensor_of(*bits) for name, bits in read_bits(path).items()}


def read_bits(path: Path) -> dict[str, Bits]:
    """Return the bits of all tensors of a checkpoint by name. Errors: as ``read_checkpoint``."""
    found: dict[str, Bits] = {}
    for file in files_of(path):
        for name, x in _read(file).items():
            require(name not in found, InputError, f"{name} is in two files of {path}; keep one of them")
            found[name] = x
    return found


class Stored(Mapping[str, "Tensor"]):
    """The tensors of a checkpoint by name, each read from its file whenever it is asked for.

    ``files``: its files, where it calls them otherwise than transformers and peft do.

    Errors: those of ``read_checkpoint``, and ``InputError`` where a file is cut short meanwhile.
    """

    def __init__(self, path: Path, files: Iterable[Path] | None = None) -> None:
        self._places = dict[str, tuple[BinaryIO, str, int, TensorEntry]]()
        for file in files_of(path) if files is None else files:
            opened = file.open("rb")  # it stays the file that it was where another takes its name
            weakref.finalize(self, opened.close)
            entries, begin = _head_of(opened, file)
            for name, entry in entries.items():
                told = f"{name} is in two files of {path}; keep one of them"
                require(name not in self._places, InputError, told)
                self._places[name] = opened, str(file), begin, entry

    def __getitem__(self, name: str) -> Tensor:
        entry = self._places[name][3]
        data = self.piece(name, 0, entry.stop - entry.start)
        from thinwire.state.devices.tensor_words import tensor_of

        return tensor_of(*_bits(data, 0, entry._replace(start=0, stop=len(data))))

    def piece(self, name: str, start: int, stop: int) -> bytearray:
        """Return some of a tensor's bytes, as they are in its file."""
        opened, where, begin, entry = self._places[name]
        data = bytearray(stop - start)
        opened.seek(begin + entry.start + start)
        told = f"{where} was cut short while it was read; let nobody write to it, and try again"
        require(opened.readinto(data) == len(data), InputError, told)  # type: ignore[attr-defined]
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """What the files' headers say of the tensors."""
        return {name: place[3] for name, place in self._places.items()}


def _head_of(opened: BinaryIO, file: Path) -> tuple[dict[str, TensorEntry], int]:
    size = os.fstat(opened.fileno()).st_size
    start = opened.read(PREFIX.size)
    try:
        entries, _, begin = read_header(start + opened.read(min(end_of(start), MOST, size)), size)
    except PayloadError as e:
        raise InputError(f"cannot read {file}: {e}") from e
    return entries, begin


def read_header(
    data: bytes | bytearray | memoryview, size: int
) -> tuple[dict[str, TensorEntry], dict[str, str], int]:
    """Return the tensors that a header names, its metadata, and where the tensors' bytes begin.

    ``data``: at least the header; ``size``: bytes of the whole file. Errors: ``PayloadError``.
    """
    require(len(data) >= PREFIX.size, PayloadError, f"a file of {size} bytes is no safetensors file")
    whole = PREFIX.size < end_of(data) <= min(PREFIX.size + MOST, size, len(data))
    if not whole and bytes(data[:4]).startswith((b"PK\x03\x04", b"\x80\x02")):  # a zip, a pickle
        advice = "a file of torch.save, which is not read; save it with safetensors.torch.save_file"
        raise PayloadError(advice)
    require(bytes(data[: len(HEAD)]) != HEAD, PayloadError, MEANING)
    require(whole, PayloadError, f"its {size} bytes hold no header: not safetensors, or cut short")
    try:
        told, begin = fields(data)
        notes = {str(key): str(value) for key, value in (told.pop(METADATA, None) or {}).items()}
        entries = {name: _entry(name, found, size - begin) for name, found in told.items()}
    except (*WRONG_VALUES, RecursionError) as e:
        raise PayloadError(f"a damaged safetensors header: {str(e)[:100]}") from e
    return entries, notes, begin


def _entry(name: str, fields: Any, size: int) -> TensorEntry:
    kind, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    require(kind in KINDS, PayloadError, f"{name:.99} is {kind!s:.20}, which cannot be followed; cast it")
    whole = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    if whole and kind == PACKED and shape:
        whole, shape = shape[-1] % 2 == 0, (*shape[:-1], shape[-1] // 2)
    fits = whole and start <= stop <= size and stop - start == math.prod(shape) * itemsize(KINDS[kind])
    fits = fits and math.prod(max(1, n) for n in shape) < MOST_NBYTES  # torch cannot make every empty one
    require(fits, PayloadError, f"{name:.99} is not where the header says: the file is cut short or damaged")
    return TensorEntry(KINDS[kind], shape, start, stop)


def _read(file: Path) -> dict[str, Bits]:
    try:
        with file.open("rb") as opened:
            data = bytearray(os.fstat(opened.fileno()).st_size)
            n = opened.readinto(data)
    except MemoryError as e:  # which may be free again later
        raise InputError(f"cannot read {file}: {file.stat().st_size} bytes do not fit in memory") from e
    try:
        require(n == len(data), PayloadError, f"{len(data) - (n or 0)} bytes fewer than a moment ago")
        entries, _, begin = read_header(data, len(data))
    except PayloadError as e:
        raise InputError(f"cannot read {file}: {e}") from e
    return {name: _bits(data, begin, entry) for name, entry in entries.items()}


def _bits(data: bytearray, begin: int, entry: TensorEntry) -> Bits:
    raw = np.frombuffer(data, np.uint8, entry.stop - entry.start, begin + entry.start)
    word = WORDS[entry.kind]
    if raw.ctypes.data % itemsize(entry.kind):
        raw = raw.copy()  # a view of another dtype must begin at a multiple of its size
    return Bits(entry.kind, entry.shape, raw.view(word))


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write ``tensors`` as a safetensors file that replaces ``path`` at once, with ``notes`` as metadata.

    ``from_pretrained`` reads it, and needs the note ``format``, which is always ``pt``. What was left there
    when a writer was killed is removed. Errors: ``OSError``, and ``InputError`` for a dtype that such files
    do not hold; then what was there is still there.
    """
    from thinwire.state.intake import bits_of

    heads = {name: (name_of(x.dtype), tuple(x.shape)) for name, x in tensors.items()}
    _write(path, heads, lambda name: bits_of(tensors[name]).words, notes)


def write_bits(path: Path, found: Mapping[str, Bits], notes: Mapping[str, str]) -> None:
    """Write the bits of tensors as ``write_checkpoint`` does."""
    heads = {name: (bits.kind, bits.shape) for name, bits in found.items()}
    _write(path, heads, lambda name: found[name].words, notes)


Heads = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape of each tensor


def _write(path: Path, heads: Heads, words_of: Callable[[str], Array], notes: Mapping[str, str]) -> None:
    for name, (kind, _) in heads.items():
        if kind not in NAMES:
            raise InputError(
                f"{name} is {kind}, which safetensors files do not hold; leave it out, or write no file"
            )
    names = ordered({name: itemsize(kind) for name, (kind, _) in heads.items()})
    own = {}
    if HASH in notes:  # else it is no copy of a version
        own[IMPRINT] = imprint_of({name: Bits(*heads[name], words_of(name)) for name in names}, notes[HASH])
    begin = header(dict(notes) | own | {"format": "pt"}, (_told(name, *heads[name]) for name in names))
    sweep(path)
    with replacing(path) as temporary, temporary.open("xb") as file:
        file.write(begin)
        for name in names:
            file.write(words_of(name).data)


def imprint_of(found: Mapping[str, Bits], note: str) -> str:
    """Return the imprint of tensors, in whichever order. Errors: ``InputError`` for what no state has."""
    by_name = [(name, found[name]) for name in sorted(found)]
    layout = Layout(tuple(Slot(name, bits.shape, bits.kind) for name, bits in by_name))
    return imprint(layout, [bits.words for _, bits in by_name], note)


def _told(name: str, kind: str, shape: tuple[int, ...]) -> tuple[str, str, list[int], int]:
    code, sizes = NAMES[kind], list(shape)
    sizes[-1:] = [2 * n if code == PACKED else n for n in sizes[-1:]]
    return name, code, sizes, math.prod(shape) * itemsize(kind)
