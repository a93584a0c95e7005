"""Files of components: safetensors, which any program reads, with a note of what they are of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.caches.components import Basis, Components, LayerForm
from thinwire.codecs.caches.rotations import Rotation
from thinwire.files.base import check_size
from thinwire.replacing import replacing
from thinwire.state.disk.tensor_header import METADATA, NAMES, fields, header
from thinwire.types import WRONG_VALUES, InputError, PayloadError, require

KEY, VERSION = "thinwire.kv.components", 1
MOST = 8 << 30  # bytes of a file
MOST_HEADER = 1 << 24


def save(components: Components, path: str | Path) -> None:
    """Write components to a safetensors file, whole or not at all. Errors: ``OSError``."""
    with replacing(path) as part:
        part.write_bytes(components_to_bytes(components))


def load(path: str | Path) -> Components:
    """Read a file of components. Errors: ``PayloadError`` for another or damaged file, ``OSError``."""
    file = Path(path)
    check_size(file.stat().st_size, MOST, str(path))
    try:
        return components_from_bytes(file.read_bytes())
    except PayloadError as e:
        raise PayloadError(f"{path} is no file of components: {e}") from e


def components_to_bytes(components: Components) -> bytes:
    """Return the file of components."""
    tensors = dict(_tensors(components))
    layers = [
        [f.heads, f.key, f.value, f.window, f.rotation.style, list(f.rotation.frequencies)]
        for f in components.layers
    ]
    note = {
        "version": VERSION,
        "model": components.model,
        "tokens": components.tokens,
        "layers": layers,
        "bases": [[list(b.layers), b.kind] for b in components.bases],
    }
    told = [(n, NAMES[str(t.dtype)[6:]], list(t.shape), t.nbytes) for n, t in tensors.items()]
    held = [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors.values()]
    return b"".join([header({KEY: json.dumps(note, separators=(",", ":"))}, told), *held])


def _tensors(components: Components) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor and its name, those of two bytes a value last."""
    for i, b in enumerate(components.bases):
        yield f"{i}.mean", b.mean
        yield f"{i}.deviations", b.deviations
        for k, w in enumerate(b.weights):
            yield f"{i}.weights.{k}", w
    for i, b in enumerate(components.bases):
        yield f"{i}.vectors", b.vectors.bfloat16()


def components_from_bytes(data: bytes) -> Components:
    """Return the components of a file. Errors: ``PayloadError``."""
    try:
        told, begin = fields(data, MOST_HEADER)
        note = json.loads(told.pop(METADATA)[KEY])
        version = note["version"]
        require(
            version == VERSION, PayloadError, f"version {version!r:.20}, expected {VERSION}; update thinwire"
        )
        return _read(note, {n: _tensor(data, begin, field) for n, field in told.items()})
    except (*WRONG_VALUES, RecursionError, OverflowError) as e:
        raise PayloadError(f"a damaged file of components: {str(e)[:80]}") from e


def _tensor(data: bytes, begin: int, field: Mapping[str, Any]) -> Tensor:
    """Return a tensor of a file, which must lie inside it."""
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[field["dtype"]]
    start, stop = field["data_offsets"]
    shape = tuple(field["shape"])
    n = 1
    for size in shape:
        require(type(size) is int and size > 0, PayloadError, f"a tensor of shape {shape}")
        n *= size
    good = 0 <= start <= stop <= len(data) - begin and stop - start == n * dtype.itemsize
    require(good, PayloadError, f"a tensor of {n} numbers in {stop - start} bytes")
    held = torch.frombuffer(bytearray(data[begin + start : begin + stop]), dtype=dtype).float().view(shape)
    require(bool(held.isfinite().all()), PayloadError, "a tensor with a NaN or an infinity")
    return held


def _read(note: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Components:
    layers = tuple(_form(sizes) for sizes in note["layers"])
    bases = tuple(
        Basis(
            tuple(map(int, own)),
            kind,
            tensors[f"{i}.mean"],
            tensors[f"{i}.vectors"],
            tensors[f"{i}.deviations"],
            tuple(tensors[f"{i}.weights.{k}"] for k in range(len(own) * (2 if kind == "both" else 1))),
        )
        for i, (own, kind) in enumerate(note["bases"])
    )
    try:
        return Components(str(note["model"]), int(note["tokens"]), layers, bases)
    except InputError as e:
        raise PayloadError(str(e)) from e


def _form(sizes: Sequence[Any]) -> LayerForm:
    heads, key, value, window = map(int, sizes[:4])
    style, frequencies = sizes[4:]
    good = min(heads, key, value) > 0 and window >= 0
    require(good, PayloadError, f"a layer of {heads} heads, {key} and {value} numbers")
    return LayerForm(heads, key, value, window, Rotation(style, tuple(map(float, frequencies))))
