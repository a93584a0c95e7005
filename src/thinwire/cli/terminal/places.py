"""Where a state is: a publisher's address or a store, as the commands that take either read it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from thinwire.links.address import parse_address, shown
from thinwire.links.tcp import congestion
from thinwire.types import InputError, MissingExtra, PayloadError, require

if TYPE_CHECKING:
    from thinwire.state.layout import TooLarge

HERE = "ADDRESS_OF_THIS_MACHINE"  # where none is known
PORT = 7200  # of a publisher, where nobody says otherwise
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")  # one letter is a drive, not a scheme
TokenFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="File with the token that all ends share (or set THINWIRE_TOKEN)."),
]
Congestion = Annotated[str, typer.Option(metavar="NAME", help=congestion.MEANING)]
GB, GREATEST = 1e9, 1e9
FOREVER = 1e9  # seconds: more than anybody waits, and no more than clocks can count
MaxGb = Annotated[
    float | None,
    typer.Option(metavar="GB", help="Take no larger state, so that no stranger fills the memory."),
]


class Address(NamedTuple):
    """Where a publisher listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return shown(self.host, self.port)

    @classmethod
    def parse(cls, text: str, option: str) -> Address:
        """Read ``HOST:PORT``; ``InputError`` for anything else, naming the ``option`` it was given as."""
        host, port = parse_address(text.strip())
        if port is None or not host:
            raise InputError(f"{option} {text!r} is not HOST:PORT; write it like 192.0.2.7:{PORT}")
        return cls(host, port)


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
    return Address.parse(text, "the address")


def reached_at(host: str) -> list[str]:
    """Return by which addresses others reach what listens at ``host``, which may be all of this machine's."""
    from thinwire.lab.machine.network import interfaces  # which needs ZeroMQ
    from thinwire.links.mesh import EVERYWHERE

    host = host.strip("[]")
    if host not in EVERYWHERE:
        return [host]
    own = [i.address for i in interfaces() if host == "::" or ":" not in i.address]
    return own or [HERE]


def largest(max_gb: float | None) -> int:
    """Return the bytes of the largest state to take. Errors: ``InputError``."""
    require(max_gb is None or max_gb > 0, InputError, f"--max-gb is {max_gb}; it must be above 0")
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


def check_seconds(seconds: float, option: str, least: str = "above") -> None:
    """Raise ``InputError`` for what nobody can wait; ``least`` ("above", "at least") says what of 0."""
    fits = 0 < seconds <= FOREVER or (seconds == 0 and least != "above")
    told = f"{option} is {seconds:g}; it must be {least} 0 seconds, and at most {FOREVER:g}"
    require(fits, InputError, told)


def check_file(path: Path | None, option: str) -> Path | None:
    """Return the file to write for ``path``, which may be a link to it.

    A file is replaced whole, so a pipe or a device there would be lost. Errors: ``InputError``, naming the
    ``option``, where no file could be written.
    """
    if path is None:
        return None
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    folder, said = target.parent, f"cannot write {option} {path}"
    require(folder.is_dir(), InputError, f"{said}: {folder} is no folder; make it first")
    require(not target.is_dir(), InputError, f"{said}: it is a folder; give the name of a file in it")
    regular = not path.exists() or path.is_file()  # of the path: a link to a pipe leads to no name
    require(regular, InputError, f"{said}: what is there is no regular file; choose another {option}")
    free = os.access(folder, os.W_OK | os.X_OK)
    require(free, InputError, f"{said}: {folder} is not writable; choose another {option}")
    return target


def check_state(path: Path | None) -> Path | None:
    """Return what ``check_file`` does of a state to be saved; ``MissingExtra`` without the library for it."""
    target = check_file(path, "--state")
    if path is not None and find_spec("safetensors") is None:
        raise MissingExtra("--state needs safetensors: pip install 'thinwire[store]'")
    return target
