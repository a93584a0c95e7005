"""Where a state is: a publisher's address or a store, as the commands that take either read it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.links.address import Address
from thinwire.types import InputError, PayloadError, require

if TYPE_CHECKING:
    from thinwire.state.layout import TooLarge

HERE = "ADDRESS_OF_THIS_MACHINE"  # where none is known
PORT = 7200  # of a publisher, where nobody says otherwise
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")  # one letter is a drive, not a scheme
GB, GREATEST = 1e9, 1e9


def parse_place(text: str) -> Address | str:
    """Return the address of a publisher, or the URL or path of a store.

    >>> parse_place("192.0.2.7:7200"), parse_place("s3://bucket/policy"), parse_place("./policy")
    (Address(host='192.0.2.7', port=7200), 's3://bucket/policy', './policy')
    """
    if URL.match(text) or "/" in text or os.sep in text or Path(text).is_dir():
        return text
    require(
        ":" in text,
        InputError,
        f"{text!r} is not here, and it is not HOST:PORT; a store that is still to come needs a path or URL, "
        f"like ./{text or 'store'}",
    )
    return Address.parse(text, "the address", like=PORT)


def reached_at(host: str) -> list[str]:
    """Return by which addresses others reach what listens at ``host``, which may be all of this machine's."""
    from thinwire.links.mesh import EVERYWHERE
    from thinwire.runs.machine.network import interfaces  # which needs ZeroMQ

    host = host.strip("[]")
    if host not in EVERYWHERE:
        return [host]
    own = [i.address for i in interfaces() if host == "::" or ":" not in i.address]
    return own or [HERE]


def largest(max_gb: float | None) -> int:
    """Return the bytes of the largest state to take."""
    from thinwire.state.layout import MAX_NBYTES

    return MAX_NBYTES if max_gb is None else round(min(max_gb, GREATEST) * GB)


@contextmanager
def limited(where: object) -> Iterator[None]:
    """Let the refusal of a large state name --max-gb, and ``where`` the state is."""
    from thinwire.state.layout import TooLarge

    try:
        yield
    except TooLarge as e:
        raise PayloadError(f"{where}: {_too_large(e)}") from e
    except InputError as e:
        if isinstance(e.__cause__, TooLarge):  # of a file that this end saved
            raise InputError(f"--state: {_too_large(e.__cause__)}") from e
        raise


def _too_large(error: TooLarge) -> str:
    least = math.ceil(error.nbytes / GB * 1000) / 1000
    return (
        f"a state of {error.nbytes} bytes is over the limit of {error.most}; if you trust whose it is, "
        f"take it with --max-gb {least:.12g}"
    )


def check_file(path: Path | str | None, option: str) -> Path | None:
    """Return the file to write for ``path``, which may be a link to it.

    A file is replaced whole, so a pipe or a device there would be lost. Errors: ``InputError``, naming the
    ``option``, where no file could be written.
    """
    if path is None:
        return None
    path = Path(path)
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    folder, said = target.parent, f"cannot write {option} {path}"
    require(folder.is_dir(), InputError, f"{said}: {folder} is no folder; make it first")
    require(not target.is_dir(), InputError, f"{said}: it is a folder; give the name of a file in it")
    regular = not path.exists() or path.is_file()  # of the path: a link to a pipe leads to no name
    require(regular, InputError, f"{said}: what is there is no regular file; choose another {option}")
    free = os.access(folder, os.W_OK | os.X_OK)
    require(free, InputError, f"{said}: {folder} is not writable; choose another {option}")
    return target


def check_state(path: str | None) -> Path | None:
    """Return what ``check_file`` does of a state to be saved."""
    return check_file(path, "--state")


def check_new(path: Path, force: bool) -> None:
    """Raise ``InputError`` where ``path`` cannot be written, or is there and not to be written over."""
    check_file(path, "-o")
    check_absent(path, force)


def check_absent(path: Path, force: bool) -> None:
    """Raise ``InputError`` where ``path`` is there and not to be written over."""
    require(force or not os.path.lexists(path), InputError, f"{path} is there; give --force to write over it")
