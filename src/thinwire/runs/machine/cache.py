"""The cache folder: things made once and reused (tokenizers, converted weights, texts)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire.files.base import at_home
from thinwire.types import InputError


def cache_folder() -> Path:
    """Return ``THINWIRE_CACHE``, else ``XDG_CACHE_HOME/thinwire``, else ``~/.cache/thinwire``.

    ``InputError`` where a user without a home folder, as in some containers, has set neither.
    """
    own = os.environ.get("THINWIRE_CACHE")
    if own:
        return at_home(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        return (at_home(shared) if shared else Path.home() / ".cache") / "thinwire"
    except RuntimeError as e:
        raise InputError("this user has no home folder for the cache; set THINWIRE_CACHE to a folder") from e


@contextmanager
def scratch_for(target: Path) -> Iterator[Path]:
    """Yield a folder beside ``target`` that is gone after the block: for what ``target`` is made of.

    The system's place for temporary files may be small, or memory. ``InputError`` where the cache cannot be
    written, so before anything is fetched.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as place:
            yield Path(place)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``target`` only if the block succeeds.

    Two ranks may make the same folder at once: the first rename wins and the other copy is dropped, so a
    reader never sees half a folder. ``InputError`` where the cache cannot be written.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            yield work
            _publish(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Make an ``InputError`` of what the system, or safetensors, says of a cache that takes no file."""
    try:
        yield
    except _failures() as e:
        why = getattr(e, "strerror", None) or e
        raise InputError(f"cannot write {target} ({why}); free space or set THINWIRE_CACHE") from e


def _failures() -> tuple[type[Exception], ...]:
    try:
        from safetensors import SafetensorError  # no OSError, and there only with the extra that brings it
    except ImportError:
        return (OSError,)
    return (OSError, SafetensorError)


def _publish(work: Path, target: Path) -> None:
    work.chmod(0o755)
    try:
        work.rename(target)
    except OSError:
        if not target.is_dir():
            raise
