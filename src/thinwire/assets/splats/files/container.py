"""Packed scenes as safetensors files: a header, and a tensor of uint8 for each stream of each layer.

Tensors lie layer by layer behind the header, so the beginning of a file shows the layers that it holds whole.
Format: the number of bytes of a JSON object, the object, the bytes. Tensors are called by the number of their
layer, their part and their stream. Source: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from thinwire.assets.splats.part import Layer, Part
from thinwire.types import WRONG_VALUES, PayloadError, require

KEY, METADATA = "thinwire.scene", "__metadata__"
VERSION = 1
PARTS = ("stays", "stand_in", "finer")
MAX_HEADER, MAX_LAYERS = 1 << 20, 64  # bytes; layers
FREE, PER_BYTE = 1 << 16, 4  # splats that any part may have, and more for each byte of it
_LENGTH = struct.Struct("<Q")
Streams = dict[str, tuple[int, int]]  # where each is behind the header


def write_scene(layers: Sequence[Layer]) -> bytes:
    """Return the file of a scene's layers, the coarsest first."""
    heads = [{name: _head(part) for name, part in layer.parts.items()} for layer in layers]
    note = json.dumps({"version": VERSION, "layers": heads}, separators=(",", ":"))
    fields: dict[str, Any] = {METADATA: {KEY: note}}
    at, streams = 0, list[bytes]()
    for i, layer in enumerate(layers):
        for part_name, part in layer.parts.items():
            for name, data in part.streams.items():
                place = [at, at + len(data)]
                fields[f"{i}/{part_name}/{name}"] = {
                    "dtype": "U8",
                    "shape": [len(data)],
                    "data_offsets": place,
                }
                at += len(data)
                streams.append(data)
    head = json.dumps(fields, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([_LENGTH.pack(len(head)), head, *streams])


def _head(part: Part) -> dict[str, Any]:
    return {"codec": part.codec, "count": part.count, "bands": part.bands, "about": dict(part.about)}


def is_scene(data: bytes | memoryview) -> bool:
    """Return whether a file, of which ``data`` is the beginning, says that it is a packed scene."""
    return KEY.encode() in bytes(data[8:256])


def read_scene(data: bytes | memoryview) -> list[Layer]:
    """Return the layers that a file, or the beginning of one, holds whole; at least one.

    Errors: ``PayloadError``.
    """
    layers, ends = read_layers(data)
    told = f"{len(data)} bytes of a scene whose first layer ends at byte {ends[0]}: it was cut short"
    require(bool(layers), PayloadError, told)
    return layers


def read_layers(data: bytes | memoryview) -> tuple[list[Layer], list[int]]:
    """Return the layers that a file, or the beginning of one, holds whole, and where each of all ends.

    Errors: ``PayloadError``.
    """
    require(len(data) > _LENGTH.size, PayloadError, f"{len(data)} bytes are no packed scene")
    (length,) = _LENGTH.unpack_from(data)
    good = 2 <= length <= MAX_HEADER and is_scene(data)
    require(good, PayloadError, "it does not begin as a packed scene does")
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
        heads = note["layers"]
        require(0 < len(heads) <= MAX_LAYERS, PayloadError, f"{len(heads)} layers")
        places, ends = _places(fields, heads, begin)
        whole = [(head, own) for head, own, end in zip(heads, places, ends, strict=True) if end <= len(data)]
        return [_layer(data, head, own) for head, own in whole], ends
    except (*WRONG_VALUES, RecursionError) as e:
        raise PayloadError(f"a damaged header: {str(e)[:80]}") from e


def _places(
    fields: dict[str, Any], heads: list[dict[str, Any]], begin: int
) -> tuple[list[dict[str, Streams]], list[int]]:
    """Return where the streams of each layer's parts are, one behind the other, and where each layer ends."""
    found = [{name: Streams() for name in head} for head in heads]
    at, last, ends = begin, 0, [begin] * len(heads)
    for name, field in fields.items():
        number, part, stream = name.split("/")
        (start, stop), i = field["data_offsets"], int(number)
        good = last <= i < len(heads) and field["dtype"] == "U8" and field["shape"] == [stop - start]
        good = good and begin + start == at and type(stop) is int and stop >= start
        require(good, PayloadError, f"{name!r:.40} is not where the header says")
        last, at = i, begin + stop
        found[i][part][stream] = (begin + start, at)
        ends[i] = at
    require(
        all(own for layer in found for own in (layer, *layer.values())), PayloadError, "a layer of nothing"
    )
    return found, ends


def _layer(data: bytes | memoryview, head: dict[str, Any], places: dict[str, Streams]) -> Layer:
    require(set(head) <= set(PARTS), PayloadError, f"a layer of {', '.join(head)!s:.40}")
    parts = {name: _part(data, head[name], places[name]) for name in head}
    return Layer(**parts)


def _part(data: bytes | memoryview, about: dict[str, Any], places: Streams) -> Part:
    streams = {name: bytes(data[start:stop]) for name, (start, stop) in places.items()}
    count, bands, nbytes = about["count"], about["bands"], sum(map(len, streams.values()))
    good = type(count) is int and 0 < count <= FREE + PER_BYTE * nbytes
    require(good, PayloadError, f"{count!r:.20} splats in {nbytes} bytes")
    good = type(bands) is int and 0 <= bands <= 3 and isinstance(about["about"], dict)
    require(good, PayloadError, f"{bands!r:.20} bands of harmonics")
    return Part(str(about["codec"]), count, bands, about["about"], streams)
