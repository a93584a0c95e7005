"""Fetch Fashion-MNIST from Debian's package into the cache folder, without root and without installing it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from thinwire.lab.data.images import FASHION, PACKAGED
from thinwire.lab.machine.cache import cache_folder, new_folder
from thinwire.types import InputError, require

PACKAGE = f"dataset-{FASHION}"
SHA256 = {
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
}  # of the files in version 0.0~git20200523.55506a9-1
FILE_LIMIT = 1 << 26  # bytes of one file; the largest has 26 MB
TIMEOUT = 300.0  # seconds for each of the two programs
REMEDY = f"put the package's four .gz files into {FASHION}/ of the folder that THINWIRE_DATA names"


def fetch_fashion() -> Path:
    """Put the four files of Debian's package into the cache folder, and return their folder.

    ``apt-get download`` needs no root and runs nothing of the package; it is unpacked into a temporary
    folder. Only the four files are kept, each by its pinned hash. ``InputError`` where the machine has no
    apt, where apt fails, and for other files.
    """
    folder = cache_folder() / FASHION
    if folder.is_dir():
        return folder
    for program in ("apt-get", "dpkg-deb"):
        there = shutil.which(program) is not None
        require(there, InputError, f"this machine has no {program} to fetch {PACKAGE} with; {REMEDY}")
    with tempfile.TemporaryDirectory(prefix="thinwire-") as scratch:
        unpacked = Path(scratch) / "unpacked"
        _run(["apt-get", "download", PACKAGE], scratch, "run apt-get update first, or ")
        archives = sorted(Path(scratch).glob(f"{PACKAGE}_*.deb"))
        require(len(archives) == 1, InputError, f"apt-get download left no {PACKAGE}; {REMEDY}")
        _run(["dpkg-deb", "-x", str(archives[0]), str(unpacked)], scratch)
        with new_folder(folder) as work:
            keep_files(unpacked / PACKAGED.relative_to("/"), work)
    return folder


def keep_files(source: Path, folder: Path) -> None:
    """Copy the four files into ``folder``; ``InputError`` where one is missing or not the one that is pinned.

    A link is not followed: it could lead out of what was unpacked.
    """
    for name, wanted in SHA256.items():
        file = source / name
        plain = file.is_file() and not file.is_symlink() and file.stat().st_size <= FILE_LIMIT
        require(plain, InputError, f"{PACKAGE} has no file {name}; {REMEDY}")
        data = file.read_bytes()
        found = hashlib.sha256(data).hexdigest()
        other = f"{name} of {PACKAGE} has SHA-256 {found[:12]}..., not {wanted[:12]}...; {REMEDY}"
        require(found == wanted, InputError, other)
        (folder / name).write_bytes(data)


def _run(command: Sequence[str], folder: str, first: str = "") -> None:
    english = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=english, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as e:
        raise InputError(f"{command[0]} took more than {TIMEOUT:.0f} s for {PACKAGE}; {REMEDY}") from e
    errors = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("W:")]
    why = errors[-1].strip() if errors else f"exit code {done.returncode}"
    require(done.returncode == 0, InputError, f"{command[0]} fails for {PACKAGE} ({why}); {first}{REMEDY}")
