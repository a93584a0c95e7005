"""What a file is, by its header alone: a saved state, a patch of a store, or a checkpoint of any program."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.files.checkpoint import HASH, IMPRINT, TensorEntry, imprint_of, read_bits, read_header
from thinwire.files.safetensors import TENSOR, unwrap
from thinwire.state.disk.tensor_header import MOST, PREFIX, end_of
from thinwire.state.layout import Layout, Slot
from thinwire.state.patches.patch import Patch
from thinwire.state.replica import Replica
from thinwire.types import WRONG_VALUES, InputError, MissingExtra, PayloadError, require


@dataclass(frozen=True)
class FileNotes:
    """What is known of a file: its kind, bytes, layout (a patch has none), and what its header says.

    ``check`` reads all of it, and returns why nothing can be said of it, "" where all hashes are right; it
    raises ``PayloadError`` where one is wrong.
    """

    kind: str
    nbytes: int
    layout: Layout | None
    known: Mapping[str, Any]
    check: Callable[[], str]


def read_notes(path: Path) -> FileNotes:
    """Return what the safetensors file at ``path`` is.

    Errors: ``InputError`` for another kind of file, ``PayloadError`` for a damaged one, ``OSError``.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(PREFIX.size)
        head += file.read(min(size, end_of(head), MOST))
    try:
        entries, metadata, _ = read_header(head, size)
    except PayloadError as e:
        raise InputError(f"cannot read {path}: {e}") from e
    if "thinwire.layout" in metadata:
        return _saved(path, size, metadata)
    if list(entries) == [TENSOR] and {"base", "version"} <= metadata.keys():
        return _patch(path, size)
    return _checkpoint(path, size, entries, metadata)


def _saved(path: Path, size: int, metadata: Mapping[str, str]) -> FileNotes:
    try:
        layout = Layout.from_json(metadata["thinwire.layout"].encode(), sys.maxsize)  # of the user's own
        found = json.loads(metadata["thinwire.version"])
        own = {"version": found["number"], "hash": found["hash"], "published": found["published"]}
        known = dict(found["meta"]) | own
    except WRONG_VALUES as e:
        raise PayloadError(f"{path} is not a saved state: {str(e)[:100]}; fetch the state anew") from e
    return FileNotes("saved state", size, layout, known, lambda: _check_saved(path))


def _check_saved(path: Path) -> str:
    try:
        Replica.load(path, sys.maxsize)
    except MissingExtra:
        raise
    except InputError as e:  # it is the file that is wrong, not what was asked for
        raise PayloadError(str(e)) from e
    return ""


def _patch(path: Path, size: int) -> FileNotes:
    patch = Patch.unpack(unwrap(path.read_bytes()), sys.maxsize)  # its check sum is over all of it
    known: dict[str, Any] = dict(patch.meta) | {"base": patch.base, "version": patch.version}
    known |= {"hash": f"{patch.hash:016x}", "published": patch.published, "layout": patch.layout}
    known |= {"base_hash": f"{patch.base_hash:016x}"} if patch.base else {}
    return FileNotes("patch" if patch.base else "keyframe", size, None, known, lambda: "")


def _checkpoint(
    path: Path, size: int, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]
) -> FileNotes:
    try:
        layout = Layout(tuple(Slot(name, e.shape, e.kind) for name, e in entries.items()))
    except InputError as e:
        raise InputError(f"{path}: {e}") from e
    return FileNotes("checkpoint", size, layout, metadata, lambda: _check_written(path, metadata))


def _check_written(path: Path, metadata: Mapping[str, str]) -> str:
    """Check a file that a follower wrote; of any other one nothing is known."""
    if IMPRINT not in metadata:
        return "its hash needs an order that it does not tell" if HASH in metadata else "it carries no hash"
    try:
        found = imprint_of(read_bits(path), metadata.get(HASH, ""))
    except InputError as e:  # it was replaced meanwhile
        raise PayloadError(str(e)) from e
    whole = found == metadata[IMPRINT]
    require(whole, PayloadError, f"{path} was damaged or written to; follow its publisher anew")
    return ""
