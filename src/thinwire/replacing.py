"""Files that are replaced whole: whoever reads finds what was there before, or all of what is there now."""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PART = ".part"  # what a file that is still being written is called at the end
# Seconds without a change after which such a file counts as left behind. Who still writes it changes it all
# the time, but for the end, when the disk takes what memory holds of it: that takes less.
LEFT = 300.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to; the file takes the place of ``path`` at the end of the block.

    It lies beside ``path`` as ``.NAME.8HEX.part``, and is on the disk before it gets the name. If the block
    raises, ``path`` stays as it was and nothing is left. Errors: ``OSError``, which names ``path``, and those
    of the block.

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
        temporary.touch()
        mode = temporary.stat().st_mode  # what the umask leaves; safetensors writes for the owner alone
        temporary.unlink()
        yield temporary
        temporary.chmod(mode)
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())  # or a power cut leaves the new name on an empty file
        temporary.replace(path)
    except OSError as e:
        if e.errno in FULL or e.filename == str(temporary):  # no name is known, or one that nobody gave
            e.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sweep(path: str | Path) -> None:
    """Remove what writers of ``path`` that were killed left beside it, as large as itself.

    Another process may be writing to ``path``, though none should: what has changed in the last ``LEFT``
    seconds stays. What cannot be removed stays too: it keeps nobody from writing.
    """
    path = Path(path)
    part = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(PART)}")
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if part.fullmatch(entry.name):
                _remove_left(entry)


def _remove_left(entry: os.DirEntry[str]) -> None:
    with suppress(OSError):
        rested = time.time() - entry.stat(follow_symlinks=False).st_mtime
        if rested >= LEFT and entry.is_file(follow_symlinks=False):
            Path(entry.path).unlink()
