"""Delta folders of TRL's delta weight sync: positions and values in bfloat16, and now and then all of them.

The format, read in ``delta_engine.py``, ``delta_codec.py`` and ``weight_diff.py`` of TRL's pull request 5937
(commit 019ac735; it was closed, and TRL 1.16 has none of it) [quoted: code]. A version is one file,
``deltas/step_000004.safetensors`` or, whole, ``anchors/step_000010.safetensors``. A delta's base is the
version before. A tensor ``w`` that changed is ``w.val`` [n], bfloat16, and ``w.idx`` [n]: flat positions,
int32 (``raw``), or the gaps before them less one, uint16 or uint32 (``gap_delta``). The metadata say which,
``model_version``, and whether it is ``sparse``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from thinwire.files.base import Folder
from thinwire.files.checkpoint import TensorEntry, read_header
from thinwire.state.disk.tensor_header import header, ordered
from thinwire.state.layout import WORDS, Array
from thinwire.state.values import Bits
from thinwire.types import InputError, PayloadError, require
from thinwire.uses.following.hosts.disk_deltas.delta_entries import (
    DeltaEntry,
    Held,
    Pieces,
    check_same,
    check_whole,
    code_of,
    known,
    refuse_pickles,
)

ANCHORS, DELTAS = "anchors", "deltas"
STEP = re.compile(r"step_(\d{1,12})\.safetensors")
FORMAT, BF16 = "sparse_weight_patch", "bfloat16"
RAW, GAPS = "raw", "gap_delta"
VALUES, PLACES = ".val", ".idx"
KINDS = {RAW: ("int32",), GAPS: ("uint16", "uint32")}
Positions = npt.NDArray[np.int64]


class SparseDeltas:
    """The format of TRL."""

    name = "trl"

    def names(self, folder: Folder) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for sub in (ANCHORS, DELTAS):
            for name in sorted(folder.sizes(sub)):
                if match := STEP.fullmatch(name.rpartition("/")[2]):
                    found.setdefault(int(match[1]), []).append(name)
        return found

    def entries(self, folder: Folder, above: int) -> list[DeltaEntry]:
        found = []
        for sub in (ANCHORS, DELTAS):
            sizes = folder.sizes(sub)
            refuse_pickles(sizes, folder.where)
            for name, size in sorted(sizes.items()):
                if match := STEP.fullmatch(name.rpartition("/")[2]):
                    number = int(match[1])
                    base = None if sub == ANCHORS else number - 1
                    found.append(DeltaEntry(number, base, name, ((name, size),)))
        return found

    def read(self, folder: Folder, entry: DeltaEntry, held: Held, limit: int) -> dict[str, Bits]:
        where = f"{folder.where}/{entry.name}"
        raw = folder.read(entry.name, limit)
        entries, notes, begin = read_header(raw, len(raw))
        _check_notes(notes, entry, where)
        body = np.frombuffer(raw, np.uint8)[begin:]
        if entry.base is not None:
            return _applied(entries, body, held, notes.get("encoding", GAPS), where)
        found = {name: Bits(one.kind, one.shape, _words(one, body).copy()) for name, one in entries.items()}
        check_whole(found, held, where)
        return found

    def place(self, number: int, whole: bool) -> str:
        return f"{ANCHORS if whole else DELTAS}/step_{number:06d}.safetensors"

    def files(self, number: int, before: Held | None, after: Held) -> list[tuple[str, Pieces]]:
        for name, bits in after.items():
            told = f"TRL's deltas hold bfloat16 alone, and {name} is {bits.kind}"
            require(bits.kind == BF16, InputError, f"{told}; publish floats, with --dtype bf16")
        parts: dict[str, tuple[str, list[int], Array]] = {}
        changed = 0
        for name, bits in after.items():
            if before is None:
                parts[name] = code_of(name, bits), list(bits.shape), bits.words
                changed += bits.words.size
            elif (places := np.flatnonzero(bits.words != before[name].words)).size:
                gaps = _gaps(places)
                parts[name + VALUES] = "BF16", [places.size], bits.words[places]
                parts[name + PLACES] = f"U{8 * gaps.itemsize}", [gaps.size], gaps
                changed += places.size
        named = len(parts) if before is None else len(parts) // 2
        notes = _notes(number, before is not None, named, changed, sum(b.words.size for b in after.values()))
        names = ordered({name: words.itemsize for name, (_, _, words) in parts.items()})
        told_parts = ((n, parts[n][0], parts[n][1], parts[n][2].nbytes) for n in names)
        file: Pieces = (header(notes, told_parts), *(parts[name][2] for name in names))
        return [(self.place(number, before is None), file)]


TRL = SparseDeltas()


def _notes(number: int, sparse: bool, named: int, changed: int, numel: int) -> dict[str, str]:
    """Return a file's metadata."""
    share = f"{1 - changed / max(1, numel):.6g}"
    counts = {"num_changed_params": str(named), "total_changed_elements": str(changed)}
    counts |= {"total_elements": str(numel), "sparsity": share, "encoding": GAPS}
    return {"format": FORMAT, "version": "1", "sparse": str(sparse), "model_version": str(number), **counts}


def _check_notes(notes: Mapping[str, str], entry: DeltaEntry, where: str) -> None:
    """Raise ``InputError`` for a file that is something else than its name says."""
    form = notes.get("format"), notes.get("version")
    told = f"{where} has the format {form[0]!r:.40} {form[1]!r:.9}, and this reads {FORMAT!r} '1'"
    require(form == (FORMAT, "1"), InputError, f"{told}; write it with the code of TRL's pull request 5937")
    number = notes.get("model_version", "")
    told = f"{where} calls itself version {number:.20}; let one run alone write to this folder"
    require(number == str(entry.number), InputError, told)
    kind = "a delta" if notes.get("sparse") == "True" else "whole"
    own = "whole" if entry.base is None else "a delta"
    told = f"{where} is {kind} by its metadata and {own} by its name; write it again"
    require(kind == own, InputError, told)


def _words(entry: TensorEntry, body: npt.NDArray[np.uint8]) -> Array:
    return np.ascontiguousarray(body[entry.start : entry.stop]).view(WORDS[entry.kind])


def _applied(
    entries: Mapping[str, TensorEntry], body: npt.NDArray[np.uint8], held: Held, coding: str, where: str
) -> dict[str, Bits]:
    told = f"{where} has positions {coding!r:.30}, and this reads {' and '.join(KINDS)}; choose one of these"
    require(coding in KINDS, InputError, f"{told} as delta_sync_encoding")
    found = {}
    for key, values in entries.items():
        if key.endswith(PLACES):
            continue
        name, at = key.removesuffix(VALUES), entries.get(key.removesuffix(VALUES) + PLACES)
        if at is None or name == key or at.kind not in KINDS[coding] or at.shape != values.shape:
            raise PayloadError(f"{key:.99} in {where} has no {coding} positions beside it")
        base = known(name, held, where)
        check_same(name, Bits(values.kind, base.shape, base.words), base, where)
        places = _places(_words(at, body), coding)
        inside = not places.size or (places[0] >= 0 and places[-1] < base.words.size)
        good = inside and (np.diff(places) > 0).all()
        told = f"positions of {name} in {where} are not in its {base.words.size} values, or not in order"
        require(bool(good), InputError, f"{told}; give the checkpoint that the run began with")
        words = base.words.copy()
        words[places] = _words(values, body)
        found[name] = Bits(base.kind, base.shape, words)
    return found


def _places(words: Array, coding: str) -> Positions:
    """Return positions [n] from what a file holds of them."""
    if coding == RAW:
        return words.astype(np.int64)
    return np.cumsum(words.view(f"u{words.itemsize}").astype(np.int64) + 1) - 1


def _gaps(places: Positions) -> Array:
    """Return the gap before each position, less one; in two bytes each where all fit.

    >>> _gaps(np.array([0, 1, 9])).tolist()
    [0, 0, 7]
    """
    gaps = np.diff(places, prepend=-1) - 1
    return gaps.astype(np.uint16 if not gaps.size or int(gaps.max()) < 1 << 16 else np.uint32)
