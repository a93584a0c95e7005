"""Caches to bytes and back, whole or as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from thinwire.codecs.caches.cache_rows import CacheRows
from thinwire.codecs.caches.components import Components
from thinwire.kv.cache_stream import CacheReader, arrivals, packed_parts
from thinwire.kv.host_caches import Arriving, arriving_cache, cache_of, layers_of
from thinwire.types import PayloadError

BITS = 1.0  # of a number that is not kept exactly
FIRST, LAST = 4, 64  # tokens that are


def pack_cache(
    past_key_values: Any, components: Components, *, bits: float = BITS, first: int = FIRST, last: int = LAST
) -> bytes:
    """Return a ``DynamicCache`` of one text as bytes, with about ``bits`` bits for each number.

    The ``first`` and ``last`` tokens come back exactly, and are not counted in ``bits``. Fewer bits lose
    more: see the page on caches. Errors: ``InputError`` for another kind of cache, for one of another
    model's shape, or for numbers that are not finite.
    """
    return b"".join(pack_parts(past_key_values, components, bits=bits, first=first, last=last))


def pack_parts(
    past_key_values: Any, components: Components, *, bits: float = BITS, first: int = FIRST, last: int = LAST
) -> Iterator[bytes]:
    """Yield what ``pack_cache`` returns in parts, some layers each, so that the first can be sent at once."""
    layers, seen = layers_of(past_key_values)
    return packed_parts(layers, seen, components, CacheRows(components.step(bits), first, last))


def unpack_cache(
    data: bytes | bytearray | memoryview, components: Components, device: Any = "cpu", most: int | None = None
) -> Any:
    """Return the ``DynamicCache`` that was packed with these components, of at most ``most`` tokens.

    Errors: ``InputError`` for a cache of other components, ``PayloadError`` for damaged or cut bytes.
    """
    reader = CacheReader(components, most)
    arrived = reader.feed(data)
    reader.close()
    seen = reader.head.seen if reader.head is not None else 0
    return cache_of(iter(arrived), seen, components.layers, device)


def unpack_parts(
    parts: Iterable[bytes], components: Components, device: Any = "cpu", most: int | None = None
) -> Any:
    """Return a ``DynamicCache`` as soon as its head has come; its layers come while a model runs on it.

    ``parts``: the bytes in any pieces, read when the model first asks for a layer. What is wrong with them
    is raised there. Errors: as ``unpack_cache``.
    """
    reader, source = CacheReader(components, most), iter(parts)
    early = []
    while reader.head is None:
        part = next(source, None)
        if part is None:
            raise PayloadError("a packed cache that ends before its head does: it was cut")
        early += reader.feed(part)
    head = reader.head
    about = Arriving(head.seen, head.kept, head.dtype, components.layers, device)
    return arriving_cache(arrivals(reader, source, early), about)
