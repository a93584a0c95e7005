"""A packed model as a checkpoint of codes: tensors that a publisher sends, so that few that move cost little.

Entropy coding is left to what carries them. Every matrix has its codes under its own name, of int8 where they
fit, and its steps or scales beside them. What else reading needs is a tensor of JSON, and the other files are
one tensor; both have room to grow, because who follows a model takes no tensors of other shapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.types import WRONG_VALUES, PayloadError, require
from thinwire.uses.models.entry import DTYPES, pack_entry, power_in, shape_of, unpack_entry
from thinwire.uses.models.packed_model import OLDEST, VERSION, PackedModel, version_of
from thinwire.uses.models.tensors import (
    REACH,
    WIDTHS,
    Coded,
    Grouped,
    Plain,
    Stepped,
    Tied,
    groups_of,
    matrix_shape,
)

NOTE, FILES = "thinwire.codes", "thinwire.files"
ROOM = 256  # bytes of the least room that the note or a file has
ROWS, COLUMNS, SCALES = "/rows", "/columns", "/scales"
Tensors = dict[str, Tensor]


def code_tensors(model: PackedModel) -> Tensors:
    """Return the tensors of a checkpoint of codes. Errors: ``PayloadError``."""
    found, about = Tensors(), dict[str, Any]()
    for name, entry in model.entries.items():
        coded = unpack_entry(entry, name)
        about[name] = dict(entry.about)
        found |= _tensors(name, coded)
    sizes = {name: len(model.files[name]) for name in sorted(model.files)}
    note = {"version": version_of(model), "tensors": about, "files": sizes}
    told = json.dumps(note, separators=(",", ":")).encode()
    files = b"".join(model.files[name].ljust(_room(n), b"\0") for name, n in sizes.items())
    return found | {
        NOTE: _bytes(told.ljust(_room(len(told)))),
        FILES: _bytes(files.ljust(_room(len(files)), b"\0")),
    }


def _room(nbytes: int) -> int:
    """Return the room that so many bytes are given: a power of two."""
    return max(ROOM, 1 << (nbytes - 1).bit_length())


def _files(tensors: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the other files: one after another, each in its room."""
    found, data, at = dict[str, bytes](), _data(tensors, FILES), 0
    for name, n in sizes.items():
        good = type(n) is int and 0 <= n <= len(data) - at
        require(good, PayloadError, f"{name!r:.99} has {n!r:.20} bytes, which are not there")
        found[name] = data[at : at + n]
        at += _room(n)
    return found


def _tensors(name: str, coded: Coded) -> Tensors:
    if isinstance(coded, Tied):
        return {}
    if isinstance(coded, Plain):
        return {name: coded.values}
    if isinstance(coded, Grouped):
        return {name: coded.codes.to(torch.int8), name + SCALES: coded.scales}
    own = {name: coded.codes.to(torch.int16 if coded.wide else torch.int8)}
    parts = {ROWS: coded.row_parts, COLUMNS: coded.column_parts}
    return own | {name + end: x.to(torch.int16) for end, x in parts.items()}


def is_codes(names: Iterable[str]) -> bool:
    """Say whether the names of a checkpoint's tensors are those of codes."""
    return NOTE in names


def from_code_tensors(tensors: Mapping[str, Tensor]) -> PackedModel:
    """Return the packed model in a checkpoint of codes. Errors: ``PayloadError``."""
    try:
        note = json.loads(_data(tensors, NOTE))
        version = note["version"]
        told = f"codes of version {version!r:.20}, and this thinwire reads version {VERSION}; update thinwire"
        require(OLDEST <= version <= VERSION, PayloadError, told)
        entries = {name: pack_entry(_coded(name, about, tensors)) for name, about in note["tensors"].items()}
        return PackedModel(entries, _files(tensors, note["files"])).checked()
    except WRONG_VALUES as e:
        raise PayloadError(f"a damaged checkpoint of codes: {str(e)[:80]}") from e


def _coded(name: str, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Coded:
    if about["kind"] == Tied.kind:
        return Tied(str(about["name"]))
    shape, dtype, swapped = shape_of(about, name), DTYPES[about["dtype"]], about.get("swapped", False)
    if about["kind"] == Plain.kind:
        return Plain(_fitting(tensors, name, shape, [dtype]))
    rows, columns = matrix_shape(shape, swapped)
    found = _fitting(tensors, name, (rows, columns), [torch.int8, torch.int16])
    codes, wide, power = found.to(torch.int16), found.dtype == torch.int16, power_in(about)
    if about["kind"] == Grouped.kind:
        width = about["width"]
        require(width in WIDTHS, PayloadError, f"codes of {width!r:.20} bits")
        kinds = [torch.float16, torch.bfloat16]
        scales = _fitting(tensors, name + SCALES, (rows, groups_of(columns)), kinds)
        return Grouped(codes, scales, width, shape, dtype, swapped, power)
    require(about["kind"] == Stepped.kind, PayloadError, f"{name:.99} is coded in an unknown way")
    parts = [
        _fitting(tensors, name + end, (n,), [torch.int16]) for end, n in ((ROWS, rows), (COLUMNS, columns))
    ]
    good = all(not x.numel() or int(x.abs().max()) <= REACH for x in parts)
    require(good, PayloadError, f"{name:.99} has steps that no tensor has")
    return Stepped(codes, parts[0].int(), parts[1].int(), shape, dtype, swapped, wide, power)


def _fitting(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtypes: list[torch.dtype]
) -> Tensor:
    x = tensors.get(name)
    require(x is not None, PayloadError, f"there is no {name:.99}: a part of the checkpoint is missing")
    found = torch.empty(0) if x is None else x
    told = f"{name:.99} is {tuple(found.shape)} of {found.dtype}, expected {shape} of {dtypes[0]}"
    require(tuple(found.shape) == shape and found.dtype in dtypes, PayloadError, told)
    return found


def _bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _data(tensors: Mapping[str, Tensor], name: str) -> bytes:
    x = tensors.get(name)
    if x is None or x.dtype != torch.uint8 or x.ndim != 1:
        raise PayloadError(f"there is no {name:.99}: a part of the checkpoint is missing")
    return x.cpu().numpy().tobytes()
