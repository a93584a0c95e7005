"""Pointers of Git LFS: what a clone has in the place of a large file that was not fetched.

Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md, "The Pointer".
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from thinwire.types import InputError

HEAD = b"version https://git-lfs.github.com/spec/"
MEANING = "a Git-LFS pointer, not the file itself; fetch that with 'git lfs pull'"


def is_pointer(path: Path) -> bool:
    """Return whether the file at ``path`` is a pointer; not where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(HEAD)) == HEAD
    except OSError:
        return False


def check_fetched(paths: Iterable[Path]) -> None:
    """Raise ``InputError`` for the first path with a pointer in the place of its file."""
    for path in paths:
        if is_pointer(path):
            raise InputError(f"{path} is {MEANING}")
