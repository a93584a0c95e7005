"""Packed scenes as safetensors files: a header, and a tensor of uint8 for each stream of each layer.

Tensors lie layer by layer behind the header, so the beginning of a file shows the layers that it holds whole.
They are called by the number of their layer, their part and their stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from thinwire.files.safetensors import FileHead, PackedFormat, checked
from thinwire.types import PayloadError, require
from thinwire.uses.scenes.part import Layer, Part

VERSION = 1
PARTS = ("stays", "stand_in", "finer")
MAX_HEADER, MAX_LAYERS = 1 << 20, 64  # bytes; layers
FREE, PER_BYTE = 1 << 16, 1  # splats that any part may have, and more for each byte of it: real ones take 3
FRAME = PackedFormat("thinwire.scene", "scene", VERSION, MAX_HEADER)
Streams = dict[str, tuple[int, int]]  # where each is behind the header


def write_scene(layers: Sequence[Layer]) -> bytes:
    """Return the file of a scene's layers, the coarsest first."""
    heads = [{name: _head(part) for name, part in layer.parts.items()} for layer in layers]
    streams = {
        f"{i}/{part_name}/{name}": data
        for i, layer in enumerate(layers)
        for part_name, part in layer.parts.items()
        for name, data in part.streams.items()
    }
    return FRAME.write({"layers": heads}, streams)


def _head(part: Part) -> dict[str, Any]:
    return {"codec": part.codec, "count": part.count, "bands": part.bands, "about": dict(part.about)}


def is_scene(data: bytes | memoryview) -> bool:
    """Return whether a file, of which ``data`` is the beginning, says that it is a packed scene."""
    return FRAME.begins(data)


def read_scene(data: bytes | memoryview) -> list[Layer]:
    """Return the layers that a file, or the beginning of one, holds whole; at least one.

    Errors: ``PayloadError``.
    """
    layers, ends = read_layers(data)
    told = f"{len(data)} bytes of a scene whose first layer ends at byte {ends[0]}: it was cut short"
    require(bool(layers), PayloadError, told)
    return layers


@checked()
def read_layers(data: bytes | memoryview) -> tuple[list[Layer], list[int]]:
    """Return the layers that a file, or the beginning of one, holds whole, and where each of all ends.

    Errors: ``PayloadError``.
    """
    heads, places, ends, _ = _parsed(data)
    whole = [(head, own) for head, own, end in zip(heads, places, ends, strict=True) if end <= len(data)]
    return [_layer(data, head, own) for head, own in whole], ends


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


@checked()
def read_outline(data: bytes | memoryview) -> Outline:
    """Return what a file's header says, which ``data`` holds at least. Errors: ``PayloadError``.

    >>> outline = read_outline(write_scene([Layer(Part("a", 3, 1, {}, {"x": b"12"}))]))
    >>> outline.version, outline.bands, outline.layers[0][:3]
    (1, 1, (('a',), 3, {'stays/x': 2}))
    """
    heads, places, ends, begin = _parsed(data)
    found, stays, bands = list[LayerOutline](), 0, 0
    for head, own, end in zip(heads, places, ends, strict=True):
        nbytes = {f"{part}/{s}": stop - at for part, x in own.items() for s, (at, stop) in x.items()}
        for name, about in head.items():
            _check(about, sum(stop - at for at, stop in own[name].values()))
            bands = about["bands"]
        stays += head["stays"]["count"] if "stays" in head else 0
        shown = stays + (head["stand_in"]["count"] if "stand_in" in head else 0)
        codecs = tuple(dict.fromkeys(str(about["codec"]) for about in head.values()))
        found.append(LayerOutline(codecs, shown, nbytes, end))
    return Outline(VERSION, begin, bands, tuple(found))


def _parsed(
    data: bytes | memoryview,
) -> tuple[list[dict[str, Any]], list[dict[str, Streams]], list[int], int]:
    """Return heads and places of a file's layers, where each ends, and where the header does."""
    head = FRAME.read(data)
    heads = head.note["layers"]
    require(0 < len(heads) <= MAX_LAYERS, PayloadError, f"{len(heads)} layers")
    require(all(set(own) <= set(PARTS) for own in heads), PayloadError, "a layer of unknown parts")
    places, ends = _by_layer(head, heads)
    return heads, places, ends, head.begin


def _by_layer(head: FileHead, heads: list[dict[str, Any]]) -> tuple[list[dict[str, Streams]], list[int]]:
    """Return where the streams of each layer's parts are, layer by layer, and where each layer ends."""
    found = [{name: Streams() for name in own} for own in heads]
    last, ends = 0, [head.begin] * len(heads)
    for name, place in head.places.items():
        number, part, stream = name.split("/")
        i = int(number)
        require(last <= i < len(heads), PayloadError, f"{name!r:.40} is not where the header says")
        found[i][part][stream] = place
        last, ends[i] = i, place[1]
    told = "a layer of nothing"
    require(all(own for layer in found for own in (layer, *layer.values())), PayloadError, told)
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
