"""Who writes to a run's folder: one run at a time, by a lock that the kernel frees when its process ends."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from thinwire.runs.machine.files import check_out
from thinwire.types import InputError

LOCK = "run.lock"
MAX_TEXT = 400  # characters of who holds a folder
WAIT, LOOKS = (
    0.05,
    10,
)  # seconds between two looks, and looks, until a holder that has just come says who it is


@contextmanager
def holding(folder: str | Path, option: str = "--out") -> Iterator[None]:
    """Make ``folder`` and let no other run write there until the block ends.

    A lock that a killed run leaves holds nobody up. On a file system without locks, as some network shares
    are, nobody is kept out. Errors: ``InputError`` where the folder cannot be written, or another run, which
    is named, holds it; ``option`` is what named the folder.
    """
    out = Path(folder)
    check_out(out, option)
    made = [path for path in (out, *out.parents) if not path.exists()]
    with _opened(out, option) as file:
        try:
            file.truncate(0)
            file.write(_own_name())
            file.flush()
            yield
        finally:
            with suppress(OSError):
                (out / LOCK).unlink()  # before the lock goes with the file, or it could be another's
            for path in made:  # of a run that was refused
                with suppress(OSError):
                    path.rmdir()


def _opened(out: Path, option: str) -> IO[str]:
    """Return the lock's file, locked, and still that of its name."""
    while True:
        out.mkdir(parents=True, exist_ok=True)
        try:
            file = (out / LOCK).open("a+", encoding="utf-8", errors="replace")
        except FileNotFoundError:  # who held the folder has just removed it
            continue
        try:
            if not _locked(file):
                told = f"{option} {out} is in use by {_holder(file)}"
                raise InputError(f"{told}; wait for its end, or choose another {option}")
            if os.path.samestat(os.fstat(file.fileno()), (out / LOCK).stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def _locked(file: IO[str]) -> bool:
    """Lock a file for this process; return False where another has, True where nobody can."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks
        return True
    return True


def _own_name() -> str:
    program, *words = sys.argv
    name = "thinwire" if Path(program).name == "__main__.py" else Path(program).name
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {since} ({shlex.join([name, *words])})"


def _holder(file: IO[str]) -> str:
    for _ in range(LOOKS):
        file.seek(0)
        text = "".join(c for c in file.read(MAX_TEXT) if c.isprintable())
        if text:
            return text
        time.sleep(WAIT)
    return "another run"
