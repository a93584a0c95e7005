"""Packed scenes as safetensors files: a header, and a tensor of uint8 for each stream of each layer.

Tensors lie layer by layer behind the header, so the beginning of a file shows the layers that it holds whole.
Format: the number of bytes of a JSON object, the object, the bytes. Source: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from thinwire.assets.splats.layer import Layer
from thinwire.types import WRONG_VALUES, PayloadError, require

KEY, METADATA = "thinwire.scene", "__metadata__"
VERSION = 1
MAX_HEADER, MAX_LAYERS = 1 << 20, 64  # bytes; layers
FREE, PER_BYTE = 1 << 16, 4  # splats that any layer may have, and more for each byte of it
_LENGTH = struct.Struct("<Q")


class Part(NamedTuple):
    """Where a layer's streams are in a file, and what its header says besides."""

    about: dict[str, Any]
    streams: dict[str, tuple[int, int]]
    end: int


def write_scene(layers: Sequence[Layer]) -> bytes:
    """Return the file of a scene's layers, the coarsest first."""
    heads = [{"codec": x.codec, "count": x.count, "bands": x.bands, "about": dict(x.about)} for x in layers]
    note = json.dumps({"version": VERSION, "layers": heads}, separators=(",", ":"))
    fields: dict[str, Any] = {METADATA: {KEY: note}}
    at, parts = 0, list[bytes]()
    for i, layer in enumerate(layers):
        for name, data in layer.streams.items():
            fields[f"{i}/{name}"] = {
                "dtype": "U8",
                "shape": [len(data)],
                "data_offsets": [at, at + len(data)],
            }
            at += len(data)
            parts.append(data)
    head = json.dumps(fields, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([_LENGTH.pack(len(head)), head, *parts])


def is_scene(data: bytes | memoryview) -> bool:
    """Return whether a file, of which ``data`` is the beginning, says that it is a packed scene."""
    return KEY.encode() in bytes(data[8:256])


def read_scene(data: bytes | memoryview) -> list[Layer]:
    """Return the layers that a file, or the beginning of one, holds whole; at least one.

    Errors: ``PayloadError``.
    """
    begin, parts = _parts(data)
    layers = list[Layer]()
    for part in parts:
        if begin + part.end > len(data):
            break
        layers.append(_layer(data, begin, part))
    first = begin + parts[0].end
    told = f"{len(data)} bytes of a scene whose first layer ends at byte {first}: it was cut short"
    require(bool(layers), PayloadError, told)
    return layers


def _parts(data: bytes | memoryview) -> tuple[int, list[Part]]:
    require(len(data) > _LENGTH.size, PayloadError, f"{len(data)} bytes are no packed scene")
    (length,) = _LENGTH.unpack_from(data)
    fits = 2 <= length <= MAX_HEADER
    require(fits and is_scene(data), PayloadError, "it does not begin as a packed scene does")
    begin = _LENGTH.size + length
    require(begin <= len(data), PayloadError, f"{len(data)} bytes of a header of {begin}: it was cut short")
    try:
        fields = json.loads(bytes(data[_LENGTH.size : begin]))
        note = json.loads(fields.pop(METADATA)[KEY])
        version = note["version"]
        told = (
            f"a scene of version {version!r:.20}, and this thinwire reads version {VERSION}; update thinwire"
        )
        require(version == VERSION, PayloadError, told)
        return begin, _checked(fields, note["layers"])
    except (*WRONG_VALUES, RecursionError) as e:
        raise PayloadError(f"a damaged header: {str(e)[:80]}") from e


def _checked(fields: dict[str, Any], heads: list[dict[str, Any]]) -> list[Part]:
    """Return the parts, whose streams must lie one behind the other."""
    require(0 < len(heads) <= MAX_LAYERS, PayloadError, f"{len(heads)} layers")
    parts = [Part(head, {}, 0) for head in heads]
    at, last = 0, 0
    for name, field in fields.items():
        layer, slash, stream = name.partition("/")
        start, stop = field["data_offsets"]
        good = bool(slash) and layer.isdigit() and last <= int(layer) < len(parts) and field["dtype"] == "U8"
        good = (
            good and start == at and type(stop) is int and stop >= start and field["shape"] == [stop - start]
        )
        require(good, PayloadError, f"{name!r:.40} is not where the header says")
        last, at = int(layer), stop
        parts[last].streams[stream] = (start, stop)
        parts[last] = parts[last]._replace(end=stop)
    require(all(part.streams for part in parts), PayloadError, "a layer without streams")
    return parts


def _layer(data: bytes | memoryview, begin: int, part: Part) -> Layer:
    about, streams = part.about, {}
    for name, (start, stop) in part.streams.items():
        streams[name] = bytes(data[begin + start : begin + stop])
    count, bands, nbytes = about.get("count", 0), about.get("bands"), sum(map(len, streams.values()))
    good = type(count) is int and 0 < count <= FREE + PER_BYTE * nbytes
    require(good, PayloadError, f"{count!r:.20} splats in {nbytes} bytes")
    good = bands in (0, 1, 2, 3) and isinstance(about.get("about"), dict)
    require(good, PayloadError, f"{bands!r:.20} bands of harmonics")
    return Layer(str(about.get("codec")), count, int(bands or 0), about["about"], streams)
