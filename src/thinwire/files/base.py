"""What every place of files offers, and what it says of itself."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Protocol

from thinwire.replacing import FULL
from thinwire.types import InputError, PayloadError


class Folder(Protocol):
    """Files by relative name, such as ``patches/a.safetensors``. Names are the caller's to check."""

    where: str  # for errors: no password in it

    def read(self, name: str, limit: int) -> bytes:
        """Return a file's bytes.

        ``FileNotFoundError`` where there is none, ``PayloadError`` where it is larger than ``limit`` bytes,
        any other ``OSError`` where the place cannot be reached.
        """
        ...

    def write(self, name: str, data: bytes) -> None:
        """Put a whole file there, replacing one of that name; ``OSError``, and no file, otherwise."""
        ...

    def delete(self, name: str) -> None:
        """Remove a file if it is there; ``OSError`` where the place cannot be reached."""
        ...

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the bytes of each file in ``folder`` by relative name, None where that is not told.

        There are none where there is no such folder. An empty name is the root's, where folders are named
        too, without bytes. ``OSError`` where the place cannot be reached.
        """
        ...


def shown(url: str) -> str:
    """Return a URL without what may be secret in it: user, password, query.

    >>> shown("s3://key:secret@bucket/model/?signature=1")
    's3://bucket/model'
    """
    return re.sub(r"//[^/]*@", "//", url.partition("?")[0].partition("#")[0]).rstrip("/")


def at_home(name: str | Path) -> Path:
    """Return a path, with a ``~`` at its begin as a shell has it; that of no known user stays as it is.

    >>> str(at_home("~nobody-of-that-name/texts"))
    '~nobody-of-that-name/texts'
    """
    return Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises for an unknown user


def check_size(nbytes: int, limit: int, where: str) -> None:
    """Raise ``PayloadError`` for a file of more than ``limit`` bytes."""
    if nbytes > limit:
        raise PayloadError(f"{where} has {nbytes} bytes, expected at most {limit}")


def refusal(error: OSError, where: str) -> InputError:
    """Return what a writer says of a place that takes no file: a full disk, a missing permission.

    >>> import errno
    >>> str(refusal(OSError(errno.ENOSPC, "No space left on device"), "models"))
    'the disk is full: cannot write to models; free space there'
    """
    if error.errno in FULL:
        return InputError(f"the disk is full: cannot write to {where}; free space there")
    reason = error.strerror or str(error) or type(error).__name__
    return InputError(f"cannot write to {where} ({reason}); choose another folder or mend its access")
