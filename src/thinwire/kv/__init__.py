"""Caches of language models that travel: a prefix's keys and values in a fraction of their bytes.

>>> from thinwire import kv
>>> components = kv.calibrate(model, texts)  # doctest: +SKIP
>>> kv.save(components, "model.components")  # doctest: +SKIP
>>> data = kv.pack_cache(past_key_values, components, bits=1.6)  # doctest: +SKIP
>>> past_key_values = kv.unpack_cache(data, components)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.codecs.caches.components import Components
    from thinwire.kv.cache_stream import CacheReader, Kept
    from thinwire.kv.load_policy import Recomputing, Verdict, load_or_recompute
    from thinwire.kv.prefix_store import PrefixStore

BITS = 1.6  # of a number that is not kept exactly
FIRST, LAST = 4, 64  # tokens that are
_HOMES = {
    "CacheReader": "cache_stream",
    "Kept": "cache_stream",
    "PrefixStore": "prefix_store",
    "Recomputing": "load_policy",
    "Verdict": "load_policy",
    "load_or_recompute": "load_policy",
}

__all__ = [
    "BITS",
    "FIRST",
    "LAST",
    "CacheReader",
    "Kept",
    "PrefixStore",
    "Recomputing",
    "Verdict",
    "calibrate",
    "load",
    "load_or_recompute",
    "pack_cache",
    "pack_parts",
    "save",
    "unpack_cache",
    "unpack_parts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def calibrate(model: Any, texts: Iterable[Tensor], *, following: int = 256) -> Components:
    """Return the components of a causal model of transformers, from token ids [tokens] of texts.

    Once a model, on texts like those that it will read: 16 of 1,280 tokens do. Of each, the last
    ``following`` say how much the rest matters. It takes two passes forward and one back.
    Errors: ``InputError`` for too short texts, or a model without a cache of keys and values.
    """
    from thinwire.kv.calibrating import calibrated

    return calibrated(model, texts, following=following)


def save(components: Components, path: str | Path) -> None:
    """Write components to a safetensors file. Errors: ``OSError``."""
    from thinwire.kv.component_file import write_components

    write_components(path, components)


def load(path: str | Path) -> Components:
    """Read components. Errors: ``PayloadError`` for another or a damaged file, ``OSError``."""
    from thinwire.kv.component_file import read_components

    return read_components(path)


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
    from thinwire.codecs.caches.cache_rows import CacheRows
    from thinwire.kv.cache_stream import packed_parts
    from thinwire.kv.host_caches import layers_of

    layers, seen = layers_of(past_key_values)
    return packed_parts(layers, seen, components, CacheRows(components.step(bits), first, last))


def unpack_cache(data: bytes | bytearray | memoryview, components: Components, device: Any = "cpu") -> Any:
    """Return the ``DynamicCache`` that was packed with these components.

    Errors: ``InputError`` for a cache of other components, ``PayloadError`` for damaged or cut bytes.
    """
    from thinwire.kv.cache_stream import CacheReader
    from thinwire.kv.host_caches import cache_of

    reader = CacheReader(components)
    arrived = reader.feed(data)
    reader.close()
    seen = reader.head.seen if reader.head is not None else 0
    return cache_of(iter(arrived), seen, components.layers, device)


def unpack_parts(parts: Iterable[bytes], components: Components, device: Any = "cpu") -> Any:
    """Return a ``DynamicCache`` as soon as its head has come; its layers come while a model runs on it.

    ``parts``: the bytes in any pieces, read when the model first asks for a layer. What is wrong with them
    is raised there. Errors: as ``unpack_cache``.
    """
    from thinwire.kv.cache_stream import CacheReader, arrivals
    from thinwire.kv.host_caches import Arriving, arriving_cache
    from thinwire.types import PayloadError

    reader, source = CacheReader(components), iter(parts)
    early = []
    while reader.head is None:
        part = next(source, None)
        if part is None:
            raise PayloadError("a packed cache that ends before its head does: it was cut")
        early += reader.feed(part)
    head = reader.head
    about = Arriving(head.seen, head.kept, head.dtype, components.layers, device)
    return arriving_cache(arrivals(reader, source, early), about)
