"""Whose scene it is, as the licence that lies beside it says."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from thinwire.uses.scenes.files.scene_file import form_of

LICENCE = re.compile(r"licen[cs]e", re.IGNORECASE)
MOST_NBYTES = 1 << 16  # of a licence that is read
FIELDS = {"title": "title", "author": "author", "licence": "licen[cs]e(?: type)?"}


def packaged() -> Path:
    """Return the scene that comes with thinwire: level 3 of PLAYBOT, with its licence beside it."""
    return Path(str(files("thinwire.uses.scenes.run") / "playbot" / "3_0.sog"))


def credit_of(source: Path) -> str:
    """Return whose scene is at a path, in one line; empty where no licence beside it names an author.

    A licence is a file with that word in its name, and has lines like ``* author: somebody``. Of a folder of
    SOG it may lie in the folder or beside it.
    """
    folders = [source, source.parent] if form_of(source) == "sog folder" else [source.parent]
    found = [f for folder in folders if folder.is_dir() for f in sorted(folder.iterdir())]
    for file in found:
        if LICENCE.match(file.name) and file.is_file() and file.stat().st_size <= MOST_NBYTES:
            line = credit_in(file.read_text("utf-8", errors="replace"))
            if line:
                return line
    return ""


def credit_in(text: str) -> str:
    """Return the credit that a licence's text asks for; empty where it names no author.

    >>> credit_in("* title: A\\n* author: B (b.org)\\n* license type: CC-BY-4.0 (http://c.org)")
    '"A" by B (b.org), CC-BY-4.0'
    """
    said = dict[str, str]()
    for name, words in FIELDS.items():
        line = re.search(rf"^[\s*]*{words}\s*:\s*(.+)$", text, re.IGNORECASE | re.MULTILINE)
        said[name] = line[1].strip() if line else ""
    if not said["author"]:
        return ""
    title = f'"{said["title"]}" by ' if said["title"] else "by "
    licence = said["licence"].partition(" (")[0]
    return title + said["author"] + (f", {licence}" if licence else "")
