"""Files that are replaced whole: whoever reads finds what was there before, or all of what is there now."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PART = ".part"  # what a file that is still being written is called at the end

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to; the file takes the place of ``path`` at the end of the block.

    It lies beside ``path`` as ``.NAME.8HEX.part``, and is on the disk before it gets the name. If the block
    raises, ``path`` stays as it was and nothing is left. Errors: ``OSError``, which names ``path`` where the
    disk is full, and those of the block.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "state.json"
    >>> with replacing(target) as part:
    ...     _ = part.write_text("{}")
    >>> [file.name for file in target.parent.iterdir()]
    ['state.json']
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())  # or a power cut leaves the new name on an empty file
        temporary.replace(path)
    except OSError as e:
        if e.errno in FULL:  # of a write, which knows no name, or of a name that nobody gave
            e.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
