"""Caches of language models that travel: a prefix's keys and values in a fraction of their bytes.

>>> from thinwire import kv
>>> components = kv.calibrate(model, texts)  # doctest: +SKIP
>>> kv.save(components, "model.kv.safetensors")  # doctest: +SKIP
>>> data = kv.pack_cache(past_key_values, components, bits=1.0)  # doctest: +SKIP
>>> past_key_values = kv.unpack_cache(data, components)  # doctest: +SKIP

Each name is imported at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.kv.cache_packing import (
        BITS,
        FIRST,
        LAST,
        pack_cache,
        pack_parts,
        unpack_cache,
        unpack_parts,
    )
    from thinwire.kv.cache_stream import CacheReader, Kept
    from thinwire.kv.calibrating import calibrate
    from thinwire.kv.component_file import load, save
    from thinwire.kv.load_policy import LoadVerdict, Recomputing, load_or_recompute
    from thinwire.kv.prefix_store import PrefixStore

_HOMES = {
    "cache_packing": ("BITS", "FIRST", "LAST", "pack_cache", "pack_parts", "unpack_cache", "unpack_parts"),
    "cache_stream": ("CacheReader", "Kept"),
    "calibrating": ("calibrate",),
    "component_file": ("load", "save"),
    "load_policy": ("Recomputing", "LoadVerdict", "load_or_recompute"),
    "prefix_store": ("PrefixStore",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BITS",
    "FIRST",
    "LAST",
    "CacheReader",
    "Kept",
    "LoadVerdict",
    "PrefixStore",
    "Recomputing",
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
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
