"""The library of compiled passes that a package may have: its ``kernels.c``, as setup.py built it."""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path


def library(folder: Path) -> ctypes.CDLL | None:
    """Return ``_kernels.bin`` of a package's folder; None where there is none of the source beside it.

    There is none where no C compiler was when thinwire was installed. Each library says with ``tw_source``
    what source it was built from.
    """
    source = folder / "kernels.c"  # where thinwire is developed
    try:
        found = ctypes.CDLL(str(folder / "_kernels.bin"))
        found.tw_source.restype = ctypes.c_int64
        current = not source.exists() or found.tw_source() == zlib.crc32(source.read_bytes())
        return found if current else None
    except (OSError, AttributeError):
        return None
