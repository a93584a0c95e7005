"""What an operating system's refusal of a file means, in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.replacing import FULL
from thinwire.types import InputError, require

REMEDY = "free space or choose another --out"


def file_trouble(error: OSError) -> str | None:
    """Return a sentence for a full disk or a file that cannot be used; ``None`` where it is about neither.

    >>> import errno
    >>> file_trouble(OSError(errno.ENOSPC, "No space left on device", "runs/a/run.json"))
    'the disk is full: cannot write runs/a/run.json; free space or choose another --out'
    """
    if error.errno in FULL:
        return f"the disk is full: cannot write {error.filename or 'the output folder'}; {REMEDY}"
    if error.filename is None:
        return None
    return f"cannot use {error.filename}: {error.strerror}; choose another path"


def _is_text(path: Path) -> bool:
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:  # of bytes that are no text in the locale's encoding
        return False
    return True


def check_out(folder: str | Path, option: str = "--out") -> None:
    """Raise ``InputError`` where ``folder`` could not be made or written; make nothing.

    ``option`` is what named it. Libraries that write there, such as tensorboard, take no name of other bytes.
    """
    path = Path(folder)
    told = f"cannot write {option} {path}: its name is not UTF-8 here; rename it, or set PYTHONUTF8=1"
    require(_is_text(path), InputError, told)
    there = next((p for p in (path, *path.parents) if p.exists()), Path())
    if not there.is_dir():
        raise InputError(f"cannot write {option} {path}: {there} is a file; choose another {option}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {option} {path}: {there} is not writable; choose another {option}")
