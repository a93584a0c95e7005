"""The library of compiled passes that a package may have: its ``kernels.c``, as setup.py built it."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def functions(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return functions of the library ``_kernels.bin`` in a package's folder, by name; all of them or none.

    There are none where no C compiler was when thinwire was installed, and none where the library was built
    from another source than lies beside it, which ``tw_source`` tells. They return int64 if nobody says
    otherwise.
    """
    source = folder / "kernels.c"
    try:
        library = ctypes.CDLL(str(folder / "_kernels.bin"))
        found = {name: getattr(library, f"tw_{name}") for name in ["source", *names]}
    except (OSError, AttributeError):
        return {}
    for function in found.values():
        function.restype = ctypes.c_int64
    stamp = found.pop("source")()
    return found if not source.exists() or stamp == zlib.crc32(source.read_bytes()) else {}


@contextmanager
def without(found: dict[str, Any]) -> Iterator[None]:
    """Let there be no functions for a while, to compare both ways; no other thread may be at work."""
    kept = dict(found)
    found.clear()
    try:
        yield
    finally:
        found.update(kept)
