"""Download by a program, pip say, or from a web server, and say how much has come."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Protocol

from thinwire.types import InputError

LOOK = 0.5  # seconds between two looks at what has come
MEGABYTE = 1e6
LIMIT = 600.0  # seconds for a download
WAIT = 30.0  # seconds without a byte from a server
PIECE = 1 << 16  # bytes that are read at once
PIP = ("-m", "pip", "download", "--no-deps", "--require-hashes", "--disable-pip-version-check")


class Told(Protocol):
    """What hears what is being done; ``passing`` texts follow each other soon, and are no lines of a log."""

    def __call__(self, text: str, passing: bool = False) -> None: ...


def silent(text: str, passing: bool = False) -> None:
    """Say nothing."""


def download(
    command: Sequence[str],
    into: Path,
    what: str,
    told: Told = silent,
    limit: float = LIMIT,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in the folder ``into`` and return how it ended; ``told`` hears what has come so far.

    Errors: ``subprocess.TimeoutExpired`` after ``limit`` seconds; the program is stopped.
    """
    end = time.monotonic() + limit
    with subprocess.Popen(
        command, cwd=into, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        errors="replace",
    ) as program:  # fmt: skip
        try:
            while True:
                try:
                    out, err = program.communicate(timeout=LOOK)
                    return subprocess.CompletedProcess(command, program.returncode, out, err)
                except subprocess.TimeoutExpired:
                    told(f"fetching {what}: {bytes_in(into) / MEGABYTE:.1f} MB", passing=True)
                    if time.monotonic() > end:
                        raise
        except BaseException:  # also a Ctrl-C that this process alone has heard
            program.kill()
            raise


def from_index(package: str, sha256: str, into: Path, form: str, remedy: str, told: Told = silent) -> Path:
    """Let pip download ``package`` (``NAME==VERSION``), whose hash is pinned, and return the file.

    ``form`` is ``--no-binary`` for its source, ``--only-binary`` for its wheel. pip uses the index that it is
    set to. Errors: ``InputError``, with ``remedy``, where pip does not bring exactly this file.
    """
    wanted, place = into / "wanted.txt", into / "fetched"
    wanted.write_text(f"{package} --hash=sha256:{sha256}\n", encoding="utf-8")
    place.mkdir()
    command = [sys.executable, *PIP, form, ":all:", "--dest", str(place), "-r", str(wanted)]
    if importlib.util.find_spec("setuptools") is not None:
        command.append("--no-build-isolation")  # else pip installs setuptools into a place of its own first
    try:
        done = download(command, into, package, told, env=os.environ | {"TMPDIR": str(into)})
    except subprocess.TimeoutExpired as e:
        raise InputError(f"pip did not fetch {package} within {LIMIT:.0f} s; {remedy}") from e
    files = sorted(place.iterdir())
    if done.returncode or len(files) != 1:
        last = (done.stderr.strip() or "no file").splitlines()[-1]
        raise InputError(f"pip could not fetch {package} ({last}); {remedy}")
    return files[0]


def read_url(url: str, most: int, heard: Callable[[int], None] = lambda nbytes: None) -> bytes:
    """Return all that a web server has at ``url``; ``heard`` is told how many bytes have come.

    Errors: ``OSError``, for whatever goes wrong on the way: an answer that breaks off, one of more than
    ``most`` bytes, one that takes more than ``LIMIT`` seconds.
    """
    data, end = bytearray(), time.monotonic() + LIMIT
    try:
        with urllib.request.urlopen(url, timeout=WAIT) as answer:
            while piece := answer.read(PIECE):
                data += piece
                heard(len(data))
                if len(data) > most or time.monotonic() > end:
                    raise OSError(f"more than {most} bytes, or {LIMIT:.0f} s")
            if answer.length:
                raise OSError(f"it broke off {answer.length} bytes before its end")
    except HTTPException as e:  # no OSError: what is no HTTP, or an answer in pieces that breaks off
        raise OSError(" ".join(f"{type(e).__name__}: {e}".split())) from e
    return bytes(data)


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files in a folder and those below it."""
    return sum(f.lstat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink())
