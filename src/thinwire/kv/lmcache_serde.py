"""Packed caches as LMCache's serde: what its remote backend calls for each chunk of tokens.

LMCache gives a chunk [2, layers, tokens, heads * width] and does not say at which token of the text it
begins, which undoing the turn of keys needs. Chunks begin at multiples of their length, though, and at the
right one the keys are most like those that the components are of: that one is found, and said in the bytes.
The names are those of LMCache 0.5.6 (``lmcache.v1.distributed.serde``).
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

from thinwire import staging
from thinwire.codecs.caches.cache_rows import CacheRows
from thinwire.codecs.caches.components import Components
from thinwire.kv.cache_stream import CacheReader, Kept, packed_parts, turns
from thinwire.types import ByteCursor, InputError, MissingExtra, PayloadError, require

_HEAD = struct.Struct("<II")  # the bytes that follow, and where the chunk begins
ROOM = 1 << 16  # bytes beside those of a chunk: heads and tables of odds
LOOKED_AT = 32  # tokens by which a chunk's place is found


def chunk_to_bytes(chunk: Tensor, components: Components, rows: CacheRows) -> bytes:
    """Return a chunk of LMCache, [2, layers, tokens, heads * width], as bytes.

    Errors: ``InputError`` for another shape than the components are of.
    """
    fits = chunk.dim() == 4 and chunk.shape[0] == 2 and chunk.shape[1] == len(components.layers)
    told = f"a chunk of shape {tuple(chunk.shape)}, expected (2, {len(components.layers)}, tokens, numbers)"
    require(fits, InputError, told)
    layers = []
    for form, keys, values in zip(components.layers, *chunk.detach().cpu(), strict=True):
        wide = keys.shape[-1] == form.heads * form.key and values.shape[-1] == form.heads * form.value
        told = f"{keys.shape[-1]} numbers of keys, expected {form.heads} heads of {form.key} as of values"
        require(wide and form.key == form.value, InputError, told)
        layers.append(Kept(*(x.unflatten(-1, (form.heads, -1)).transpose(0, 1) for x in (keys, values))))
    n = chunk.shape[2]
    begin = place_of(layers, components) if n else 0
    data = b"".join(packed_parts(layers, begin + n, components, rows))
    return _HEAD.pack(len(data), begin) + data


def chunk_of_bytes(data: bytes | bytearray | memoryview, components: Components) -> Tensor:
    """Return the chunk whose bytes ``data`` begins with. Errors: as ``CacheReader``."""
    cursor = ByteCursor(data, "a packed chunk")
    length, _ = cursor.unpack(_HEAD)
    reader = CacheReader(components)
    layers = [kept for _, kept in reader.feed(cursor.take(length))]
    reader.close()
    pairs = zip(*layers, strict=True)
    return torch.stack([torch.stack([x.transpose(0, 1).flatten(1) for x in own]) for own in pairs])


def place_of(layers: list[Kept], components: Components) -> int:
    """Return at which multiple of its length a chunk most likely begins: where its rows take fewest bits."""
    basis, forms = components.bases[0], components.layers
    n = layers[0].keys.shape[1]
    some = [getattr(layers[i], kind)[:, :LOOKED_AT].float() for i, kind in basis.columns]
    best, place = float("inf"), 0
    for begin in range(0, components.tokens - n + 1, n):
        turned = [t.turned(x, begin, back=True) for t, x in zip(turns(basis, forms), some, strict=True)]
        rows = torch.cat([x.transpose(0, 1).flatten(1) for x in turned], 1)
        sizes = ((rows - basis.mean) @ basis.analysis).abs()
        bits = float((1 + sizes / (basis.deviations + 1e-3 * basis.deviations[0])).log().sum())
        if bits < best:
            best, place = bits, begin
    return place


def register(components: Components, *, bits: float = 1.6, last: int = 0, name: str = "thinwire") -> None:
    """Make a serde known to LMCache by ``name``, as ``"serde": {"type": "thinwire"}`` of an adapter asks.

    To be called in LMCache's process before it reads its configuration. The first tokens of a text stay
    exact, and the ``last`` of each chunk. Errors: ``MissingExtra`` without LMCache, ``InputError``.
    """
    try:
        from lmcache.v1.distributed import serde
    except ImportError as e:
        raise MissingExtra("a serde of LMCache needs it; install lmcache 0.5.6 or later beside vLLM") from e
    rows = CacheRows(components.step(bits), last=last)

    class ComponentSerializer(ChunkSerializer, serde.Serializer):  # known by now
        """Packs chunks."""

    class ComponentDeserializer(ChunkDeserializer, serde.Deserializer):
        """Unpacks them."""

    def made(options: dict[str, object]) -> Any:
        workers = int(str(options.get("max_workers", 1)))
        both = ComponentSerializer(components, rows), ComponentDeserializer(components)
        return serde.AsyncSerdeProcessor(*both, max_workers=workers)

    serde.register_serde_factory(name, made)


class ChunkSerializer:
    """What LMCache calls to pack a chunk: from one of its memory objects to another, of bytes."""

    def __init__(self, components: Components, rows: CacheRows) -> None:
        self.components, self.rows = components, rows

    def serialize(self, src: Any, dst: Any, key: object) -> int:
        """Write the bytes of ``src`` into ``dst``; return how many there are. Errors: ``InputError``."""
        data = chunk_to_bytes(src.tensor, self.components, self.rows)
        room = dst.tensor.flatten()
        told = f"a chunk takes {len(data)} bytes and there is room for {room.numel()}; give it fewer bits"
        require(len(data) <= room.numel(), InputError, told)
        room[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return len(data)

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Return the bytes that chunks of such a layout take at most: their own, and few more."""
        shapes = zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
        return ROOM + sum(math.prod(map(int, shape)) * dtype.itemsize for shape, dtype in shapes)


class ChunkDeserializer:
    """What LMCache calls to unpack a chunk."""

    def __init__(self, components: Components) -> None:
        self.components = components

    def deserialize(self, src: Any, dst: Any, key: object) -> None:
        """Write the chunk whose bytes ``src`` begins with into ``dst``. Errors: ``PayloadError``."""
        chunk = chunk_of_bytes(staging.memory(src.tensor.flatten().cpu()), self.components)
        fits = tuple(chunk.shape) == tuple(dst.tensor.shape)
        require(
            fits, PayloadError, f"a chunk of shape {tuple(chunk.shape)}, expected {tuple(dst.tensor.shape)}"
        )
        dst.tensor.copy_(chunk)
