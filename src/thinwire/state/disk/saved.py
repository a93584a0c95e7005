"""A state as a safetensors file, written whole or not at all; version and layout are in its metadata.

A lossy tensor is saved as the integers that hold it, as is one of a dtype that not every safetensors reads.
Aliases are in the layout, not in the file twice.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from thinwire.replacing import replacing, sweep
from thinwire.state.disk.tensor_header import METADATA, MOST, NAMES, PREFIX, end_of, fields, header, ordered
from thinwire.state.layout import BARE, BITS, MAX_NBYTES, PARTS, Layout, Slot
from thinwire.state.patches.patch import MAX_VERSION, Version, check_meta, is_time
from thinwire.state.words import Words
from thinwire.types import WRONG_VALUES, InputError, PayloadError, require

_REMEDY = "delete it, and the state will come whole"


def save(path: str | Path, words: Words, version: Version) -> None:
    """Write ``words`` and what is known of their version. Errors: ``InputError`` naming path and reason.

    Words that do not hash to what the version should are not written. What was left there when somebody who
    saved was killed is removed.
    """
    if words.hash() != version.hash:
        raise InputError(
            f"version {version.number} was written to and is not saved to {path}: copy tensors, then train"
        )
    known = {"number": version.number, "hash": f"{version.hash:016x}", "published": version.published}
    metadata = {"thinwire.layout": words.layout.to_json().decode()}
    metadata["thinwire.version"] = json.dumps(known | {"meta": dict(version.meta)})
    slots = words.layout.slots
    index = {slot.name: i for i, slot in enumerate(slots)}
    names = ordered({slot.name: slot.word.itemsize for slot in slots})
    begin = header(
        metadata, ((name, *_form(slots[index[name]]), words.slot(index[name]).nbytes) for name in names)
    )
    sweep(path)
    try:
        with replacing(path) as temporary, temporary.open("xb") as file:
            file.write(begin)
            for name in names:
                file.write(words.slot(index[name]).data)
    except OSError as e:
        raise InputError(f"cannot save a state to {path}: {e}; free space or choose another place") from e


def load(path: str | Path, max_nbytes: int = MAX_NBYTES) -> tuple[Words, Version]:
    """Return the words in a file and their version.

    Errors: ``InputError`` for a file that cannot be read, or is no saved state: no peer sent it.
    """
    require(Path(path).is_file(), InputError, f"{path} is no file; save a replica there first")
    try:
        with Path(path).open("rb") as file:
            words, version = _read(file, max_nbytes)
    except OSError as e:
        raise InputError(f"cannot read a state from {path}: {e}") from e
    except (PayloadError, *WRONG_VALUES) as e:
        raise InputError(f"{path} is not a saved state: {str(e)[:200]}; {_REMEDY}") from e
    require(words.hash() == version.hash, InputError, f"{path} was damaged; {_REMEDY}")
    return words, version


def _read(file: BinaryIO, max_nbytes: int) -> tuple[Words, Version]:
    size, start = os.fstat(file.fileno()).st_size, file.read(PREFIX.size)
    told, begin = fields(start + file.read(min(end_of(start), MOST, size)))
    metadata = told.pop(METADATA, {})
    layout = Layout.from_json(metadata["thinwire.layout"].encode(), max_nbytes)
    known = json.loads(metadata["thinwire.version"])
    number, published = known["number"], float(known["published"])
    require(type(number) is int and 0 <= number < MAX_VERSION, PayloadError, f"version {number!r:.99}")
    require(is_time(published), PayloadError, f"a version published at {published:g}")
    version = Version(number, int(known["hash"], 16), published, check_meta(known["meta"]))
    places = [_place(slot, told[slot.name], size - begin) for slot in layout.slots]
    words = Words(layout)
    for i, at in enumerate(places):
        file.seek(begin + at)
        into = words.slot(i).view(np.uint8)
        n = file.readinto(into.data)  # type: ignore[attr-defined]
        require(n == into.size, PayloadError, f"{layout.slots[i].name} was cut short while it was read")
    return words, version


def _place(slot: Slot, found: Any, size: int) -> int:
    """Return where the bytes of a slot begin behind the header."""
    (kind, shape), (start, stop) = _form(slot), found["data_offsets"]
    got = found["dtype"], found["shape"]
    require(got == (kind, shape), PayloadError, f"{slot.name} is {got}, expected {kind}, {shape}")
    fits = all(type(n) is int for n in (start, stop)) and 0 <= start <= stop <= size
    fits = fits and stop - start == slot.count * slot.word.itemsize
    require(fits, PayloadError, f"{slot.name} is not where the header says")
    return int(start)


def _form(slot: Slot) -> tuple[str, list[int]]:
    """Return the dtype and shape that a slot is saved as: its own, or integers."""
    as_words = slot.bound or slot.kind in BITS or slot.kind in BARE
    shape = [*slot.shape, 2] if slot.kind in PARTS else [*slot.shape]
    return (f"I{8 * slot.word.itemsize}" if as_words else NAMES[slot.kind]), shape
