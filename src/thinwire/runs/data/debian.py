"""Fetch Fashion-MNIST into the cache folder: from Debian's package, else from its authors' server."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path

from thinwire.runs.machine.cache import cache_folder, new_folder, scratch_for
from thinwire.runs.machine.downloading import MEGABYTE, Told, bytes_in, download, read_url, silent
from thinwire.types import InputError, require

FASHION = "fashion-mnist"
PACKAGED = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts it
PACKAGE = f"dataset-{FASHION}"
UPSTREAM = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"  # the authors' own; hashes are pinned
SHA256 = {
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}  # of what the files unpack to: Debian has packed them anew
FILE_LIMIT = 1 << 26  # bytes of one file, packed or not; the largest has 47 MB
LISTS = ("-o", "Dir::State::lists=lists", "-o", "Dir::Cache=cache")  # own ones, which need no root
REMEDY = f"put the package's four .gz files into {FASHION}/ of the folder that THINWIRE_DATA names"


def fetch_fashion(told: Told = silent) -> Path:
    """Put the four files into the cache folder, and return their folder; ``told`` hears how much has come.

    With apt they come from Debian's package: ``apt-get download`` needs no root and runs nothing of it.
    Elsewhere, or where apt fails, they come from the authors' server. Only the four files are kept, each by
    the pinned hash of its content. ``InputError`` where neither has them.
    """
    folder = cache_folder() / FASHION
    if folder.is_dir():
        return folder
    told(f"fetching {FASHION}, 31 MB, once")
    with scratch_for(folder) as scratch, new_folder(folder) as work:
        try:
            keep_files(unpacked_package(PACKAGE, scratch, told) / PACKAGED.relative_to("/"), work)
        except InputError as e:
            keep_files(_from_authors(scratch / "own", str(e), told), work, UPSTREAM)
    return folder


def unpacked_package(package: str, scratch: Path, told: Told = silent) -> Path:
    """Fetch one of Debian's packages into ``scratch``, and return the folder of its files, not installed.

    Errors: ``InputError`` where this machine has no apt, or apt does not fetch it.
    """
    for program in ("apt-get", "dpkg-deb"):
        there = shutil.which(program) is not None
        require(there, InputError, f"this machine has no {program} to fetch {package} with")
    if not _run(["apt-get", "download", package], package, scratch, told):
        for name in ("lists/partial", "cache/archives/partial"):
            (scratch / name).mkdir(parents=True)
        for words in (["update"], ["download", package]):
            _run(["apt-get", *LISTS, *words], package, scratch, told, must=True)
    archives = sorted(scratch.glob(f"{package}_*.deb"))
    require(len(archives) == 1, InputError, f"apt-get download left no {package}")
    _run(["dpkg-deb", "-x", str(archives[0]), "unpacked"], package, scratch, told, must=True)
    return scratch / "unpacked"


def _from_authors(folder: Path, before: str, told: Told) -> Path:
    folder.mkdir()
    for name in SHA256:
        there = bytes_in(folder)

        def heard(nbytes: int, there: int = there) -> None:
            told(f"fetching {FASHION}: {(there + nbytes) / MEGABYTE:.1f} MB", passing=True)

        try:
            data = read_url(f"{UPSTREAM}/{name}", FILE_LIMIT, heard)
        except OSError as e:
            why = getattr(e, "reason", None) or e
            raise InputError(f"{before}, and {UPSTREAM} does not send {name} ({why}); {REMEDY}") from e
        (folder / name).write_bytes(data)
    return folder


def keep_files(source: Path, folder: Path, whose: str = PACKAGE) -> None:
    """Copy the four files into ``folder``; ``InputError`` where one is missing or not the one that is pinned.

    A link is not followed: it could lead out of what was unpacked. ``whose`` they are is said in an error.
    """
    for name, wanted in SHA256.items():
        file = source / name
        plain = file.is_file() and not file.is_symlink() and file.stat().st_size <= FILE_LIMIT
        require(plain, InputError, f"{whose} has no file {name}; {REMEDY}")
        found = _hash(file, whose)
        other = f"{name} of {whose} has SHA-256 {found[:12]}..., not {wanted[:12]}...; {REMEDY}"
        require(found == wanted, InputError, other)
        shutil.copyfile(file, folder / name)


def _hash(file: Path, whose: str) -> str:
    try:
        with gzip.open(file) as unpacked:
            return hashlib.sha256(unpacked.read(FILE_LIMIT)).hexdigest()
    except (OSError, EOFError, zlib.error) as e:
        raise InputError(f"{file.name} of {whose} does not unpack ({e}); {REMEDY}") from e


def _run(command: Sequence[str], package: str, folder: Path, told: Told, must: bool = False) -> bool:
    """Run a program in ``folder`` and return whether it worked; ``InputError`` if it must and does not."""
    english = os.environ | {"LC_ALL": "C"}
    try:
        done = download(command, folder, FASHION, told, env=english)
    except subprocess.TimeoutExpired as e:
        raise InputError(f"{command[0]} took too long for {package}") from e
    errors = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("W:")]
    why = errors[-1].strip() if errors else f"exit code {done.returncode}"
    require(done.returncode == 0 or not must, InputError, f"{command[0]} fails for {package} ({why})")
    return done.returncode == 0
