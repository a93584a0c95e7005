"""What terminals, pipes and files take: texts whose characters their encoding lacks, bars that are drawn."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from typing import IO, Any

NAME = "thinwire.plain"
PLAIN = {"→": "->", "←": "<-", "×": "x", "±": "+-", "·": "-", "–": "-", "—": "-", "…": "...", "µ": "u"}
PLAIN |= {"≤": "<=", "≥": ">=", "≈": "~", "‘": "'", "’": "'", "“": '"', "”": '"', "²": "2", "°": " deg"}
PLAIN |= {"\N{BULLET}": "*", "\N{NO-BREAK SPACE}": " ", "\N{THIN SPACE}": " ", "\N{FULL BLOCK}": "#"}
DUMB = ("dumb", "unknown")  # terminals without a cursor to move: those of editors and of some CI
BYTES = range(0xDC80, 0xDD00)  # how Python reads bytes of file names that are no text
PLAIN_WIDTH = 120  # columns where nobody's terminal says otherwise


def accept_all() -> None:
    """Let standard output and error take every text: what their encoding lacks is written in ASCII.

    A command has done its work when it says so, and must not end in ``UnicodeEncodeError`` then.
    """
    codecs.register_error(NAME, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=NAME)


def draws(stream: IO[Any]) -> bool:
    """Say whether a stream is a terminal where a line can be written over: a bar is of use there."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in DUMB


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(c: str) -> str:
    return f"\\x{ord(c) - 0xDC00:02x}" if ord(c) in BYTES else PLAIN.get(c, "?")


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, and nothing else."""
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def tell(text: str) -> None:
    """Print a line for people on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
