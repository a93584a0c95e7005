"""The compiled passes of a package: the library that setup.py built of its ``kernels.c`` and ``passes.h``."""

from __future__ import annotations

import ctypes
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HEADER = Path(__file__).with_name("passes.h")
_KINDS: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_size_t,
    "f": ctypes.c_float,
    "i": ctypes.c_int32,
    "u": ctypes.c_uint64,
}


class Passes(dict[str, Any]):
    """Functions of a library, by name."""

    def there(self) -> bool:
        """Return whether there are any."""
        return bool(self)

    @contextmanager
    def without(self) -> Iterator[None]:
        """Leave their work to others for a while, to compare both; no other thread may be at work."""
        kept = dict(self)
        self.clear()
        try:
            yield
        finally:
            self.update(kept)


def functions(folder: Path, names: Iterable[str] | Mapping[str, str]) -> Passes:
    """Return functions of the library ``_kernels.bin`` in a package's folder, by name; all of them or none.

    A mapping says what each takes, a letter an argument: an address, a number of elements (``n``), a float,
    an integer of 32 bits or one of 64 without a sign (``u``). Python's own numbers do then, which is quicker.

    There are none where no C compiler was when thinwire was installed, and none where the library was built
    from other sources than those of today, which ``tw_source`` tells, or where today's cannot be read, or
    where half of the library is there. They return int64 if nobody says otherwise.
    """
    path = folder / "_kernels.bin"
    try:
        if not _whole(path):
            return Passes()
        library = ctypes.CDLL(str(path))
        found = Passes({name: getattr(library, f"tw_{name}") for name in ["source", *names]})
    except (OSError, AttributeError):
        return Passes()
    for function in found.values():
        function.restype = ctypes.c_int64
    for name, kinds in names.items() if isinstance(names, Mapping) else ():
        found[name].argtypes = [_KINDS[kind] for kind in kinds]
    return found if _fits(found.pop("source")(), folder) else Passes()


def _whole(path: Path) -> bool:
    """Return whether a library has all its bytes: Linux kills a process that loads one half written.

    The head of an ELF file tells where its list of sections is, which comes last; of others nobody knows.
    """
    with path.open("rb") as file:
        head, size = file.read(64), file.seek(0, os.SEEK_END)
    if len(head) < 64 or not head.startswith(b"\x7fELF\x02"):
        return len(head) == 64
    order = "<" if head[5] == 1 else ">"
    (sections,) = struct.unpack_from(f"{order}Q", head, 40)
    each, count = struct.unpack_from(f"{order}HH", head, 58)
    return size >= int(sections) + each * count


def _fits(stamp: int, folder: Path) -> bool:
    """Return whether a library of that stamp is of the sources in a package's folder."""
    sources = HEADER, folder / "kernels.c"
    try:
        if not all(source.exists() for source in sources):  # an installed package may go without them
            return True
        return stamp == zlib.crc32(b"".join(source.read_bytes() for source in sources))
    except OSError:  # nobody can tell
        return False
