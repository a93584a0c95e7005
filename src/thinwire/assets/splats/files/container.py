"""Packed scenes as safetensors files: a header, and a tensor of uint8 for each stream of each layer.

Tensors lie layer by layer behind the header, so the beginning of a file shows the layers that it holds whole.
Format: the number of bytes of a JSON object, the object, the bytes. Tensors are called by the number of their
layer, their part and their stream. Source: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from thinwire.assets.splats.part import Layer, Part
from thinwire.types import WRONG_VALUES, PayloadError, require

KEY, METADATA = "thinwire.scene", "__metadata__"
VERSION = 1
PARTS = ("stays", "stand_in", "finer")
MAX_HEADER, MAX_LAYERS = 1 << 20, 64  # bytes; layers
FREE, PER_BYTE = 1 << 16, 1  # splats that any part may have, and more for each byte of it: real ones take 3
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
    heads, places, ends, _ = _parsed(data)
    whole = [(head, own) for head, own, end in zip(heads, places, ends, strict=True) if end <= len(data)]
    try:
        return [_layer(data, head, own) for head, own in whole], ends
    except (*WRONG_VALUES, RecursionError) as e:
        raise PayloadError(f"a damaged header: {str(e)[:80]}") from e


class LayerOutline(NamedTuple):
    """What a header says of a layer: its codecs, the splats seen with it, bytes of streams, and its end."""

    codecs: tuple[str, ...]
    splats: int
    streams: dict[str, int]
    end: int


class Outline(NamedTuple):
    """What the header of a scene says: its version and bytes, bands of harmonics, and its layers."""

    version: int
    begin: int
    bands: int
    layers: tuple[LayerOutline, ...]

    def whole(self, nbytes: int) -> int:
        """Return how many layers the first bytes of the file hold whole."""
        return sum(layer.end <= nbytes for layer in self.layers)


def read_outline(data: bytes | memoryview) -> Outline:
    """Return what a file's header says, which ``data`` holds at least. Errors: ``PayloadError``.

    >>> outline = read_outline(write_scene([Layer(Part("a", 3, 1, {}, {"x": b"12"}))]))
    >>> outline.version, outline.bands, outline.layers[0][:3]
    (1, 1, (('a',), 3, {'stays/x': 2}))
    """
    heads, places, ends, begin = _parsed(data)
    found, stays, bands = list[LayerOutline](), 0, 0
    try:
        for head, own, end in zip(heads, places, ends, strict=True):
            nbytes = {f"{part}/{s}": stop - at for part, x in own.items() for s, (at, stop) in x.items()}
            for name, about in head.items():
                _check(about, sum(stop - at for at, stop in own[name].values()))
                bands = about["bands"]
            stays += head["stays"]["count"] if "stays" in head else 0
            shown = stays + (head["stand_in"]["count"] if "stand_in" in head else 0)
            codecs = tuple(dict.fromkeys(str(about["codec"]) for about in head.values()))
            found.append(LayerOutline(codecs, shown, nbytes, end))
    except (*WRONG_VALUES, RecursionError) as e:
        raise PayloadError(f"a damaged header: {str(e)[:80]}") from e
    return Outline(VERSION, begin, bands, tuple(found))


def _parsed(
    data: bytes | memoryview,
) -> tuple[list[dict[str, Any]], list[dict[str, Streams]], list[int], int]:
    """Return heads and places of a file's layers, where each ends, and where the header does."""
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
        require(all(set(head) <= set(PARTS) for head in heads), PayloadError, "a layer of unknown parts")
        return (heads, *_places(fields, heads, begin), begin)
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
    parts = {name: _part(data, head[name], places[name]) for name in head}
    return Layer(**parts)


def _part(data: bytes | memoryview, about: dict[str, Any], places: Streams) -> Part:
    streams = {name: bytes(data[start:stop]) for name, (start, stop) in places.items()}
    _check(about, sum(map(len, streams.values())))
    return Part(str(about["codec"]), about["count"], about["bands"], about["about"], streams)


def _check(about: dict[str, Any], nbytes: int) -> None:
    """Raise ``PayloadError`` where a part claims what its bytes cannot hold."""
    count, bands = about["count"], about["bands"]
    good = type(count) is int and 0 < count <= FREE + PER_BYTE * nbytes
    require(good, PayloadError, f"{count!r:.20} splats in {nbytes} bytes")
    good = type(bands) is int and 0 <= bands <= 3 and isinstance(about["about"], dict)
    require(good, PayloadError, f"{bands!r:.20} bands of harmonics")
