"""The cache folder: things made once and reused (tokenizers, converted weights, texts)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire.types import InputError


def cache_folder() -> Path:
    """Return ``THINWIRE_CACHE``, else ``XDG_CACHE_HOME/thinwire``, else ``~/.cache/thinwire``."""
    own = os.environ.get("THINWIRE_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "thinwire"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``target`` only if the block succeeds.

    Two ranks may make the same folder at once: the first rename wins and the other copy is dropped, so a
    reader never sees half a folder. ``InputError`` where the cache cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as e:
        raise InputError(
            f"cannot write the cache folder {target.parent} ({e.strerror}); set THINWIRE_CACHE"
        ) from e
    try:
        yield work
        _publish(work, target)
    except OSError as e:
        raise InputError(
            f"cannot write {target} ({e.strerror or e}); free space or set THINWIRE_CACHE"
        ) from e
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(work: Path, target: Path) -> None:
    work.chmod(0o755)
    try:
        work.rename(target)
    except OSError:
        if not target.is_dir():
            raise
