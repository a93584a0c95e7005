"""A state as a safetensors file, written whole or not at all; version and layout are in its metadata.

A lossy tensor is saved as the integers that hold it, as is one of a dtype that not every safetensors reads.
Aliases are in the layout, not in the file twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thinwire.replacing import replacing, sweep
from thinwire.state.layout import BARE, BITS, MAX_NBYTES, PARTS, Layout
from thinwire.state.patches.patch import MAX_VERSION, Version, check_meta, is_time
from thinwire.state.words import Words
from thinwire.types import WRONG_VALUES, InputError, MissingExtra, PayloadError, require

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
    tensors = {s.name: _tensor(words, i) for i, s in enumerate(words.layout.slots)}
    library = _safetensors()
    sweep(path)
    try:
        with replacing(path) as temporary:
            library.torch.save_file(tensors, temporary, metadata=metadata)
    except (OSError, library.SafetensorError) as e:
        raise InputError(f"cannot save a state to {path}: {e}; free space or choose another place") from e


def load(path: str | Path, max_nbytes: int = MAX_NBYTES) -> tuple[Words, Version]:
    """Return the words in a file and their version.

    Errors: ``InputError`` for a file that cannot be read, or is no saved state: no peer sent it.
    """
    library = _safetensors()
    require(Path(path).is_file(), InputError, f"{path} is no file; save a replica there first")
    try:
        with library.safe_open(str(path), framework="pt") as file:
            words, version = _read(file, max_nbytes)
    except OSError as e:
        raise InputError(f"cannot read a state from {path}: {e}") from e
    except (library.SafetensorError, PayloadError, *WRONG_VALUES) as e:
        raise InputError(f"{path} is not a saved state: {str(e)[:200]}; {_REMEDY}") from e
    require(words.hash() == version.hash, InputError, f"{path} was damaged; {_REMEDY}")
    return words, version


def _read(file: Any, max_nbytes: int) -> tuple[Words, Version]:
    metadata = file.metadata() or {}
    layout = Layout.from_json(metadata["thinwire.layout"].encode(), max_nbytes)
    known = json.loads(metadata["thinwire.version"])
    number, published = known["number"], float(known["published"])
    require(type(number) is int and 0 <= number < MAX_VERSION, PayloadError, f"version {number!r:.99}")
    require(is_time(published), PayloadError, f"a version published at {published:g}")
    version = Version(number, int(known["hash"], 16), published, check_meta(known["meta"]))
    for slot in layout.slots:
        shape = tuple(file.get_slice(slot.name).get_shape())
        want = (*slot.shape, 2) if slot.dtype in PARTS else slot.shape
        require(shape == want, PayloadError, f"{slot.name} is {shape}, expected {want}")
    words = Words(layout)
    for i, slot in enumerate(layout.slots):
        into, x = _tensor(words, i), file.get_tensor(slot.name)
        require(x.dtype == into.dtype, PayloadError, f"{slot.name} is {x.dtype}, expected {into.dtype}")
        into.copy_(x)
    return words, version


def _tensor(words: Words, index: int) -> Tensor:
    """Return the words of a slot as they are saved: as its dtype, or as integers."""
    slot = words.layout.slots[index]
    flat = torch.from_numpy(words.slot(index))
    if slot.dtype in PARTS:
        return flat.view(*slot.shape, 2)
    as_words = slot.bound or slot.dtype in BITS or slot.dtype in BARE
    return (flat if as_words else flat.view(slot.dtype)).view(slot.shape)


def _safetensors() -> ModuleType:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as e:
        raise MissingExtra("saving a state needs safetensors: pip install 'thinwire[store]'") from e
    return safetensors
