"""Delta folders of slime, miles and modelexpress: a checkpoint of compressed differences for each version.

The format, read in slime's ``update_weight_from_disk_delta.py`` and ``sglang-pull_weights.patch`` (commit
624b824) and in modelexpress's ``canonical_delta.py`` and ``receiver.py`` [quoted: code]; miles
writes the same by the words of its pull request 1235 [second-hand]. A version is a folder
``weight_v000004`` (slime, miles) or ``v4`` (modelexpress) of safetensors files and an index, which is
written last. The index's ``metadata`` has ``version``, ``base_version``, ``delta_encoding``,
``compression_format`` and ``checksum_format``; a tensor that changed is the bytes [n] of a Zstandard frame,
and its new checksum is in its file's metadata under its name. A version whose index has no ``delta_encoding``
is a whole checkpoint.
"""

from __future__ import annotations

import importlib
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.codecs import zstd
from thinwire.files.base import Folder
from thinwire.files.checkpoint import INDEX, SINGLE, SUFFIX, TensorEntry, read_header
from thinwire.state.disk.tensor_header import header, ordered
from thinwire.state.layout import WORDS, itemsize
from thinwire.state.values import Bits
from thinwire.types import WRONG_VALUES, InputError, MissingExtra, PayloadError, require
from thinwire.uses.following.hosts.disk_deltas.delta_entries import (
    DeltaEntry,
    Held,
    Pieces,
    check_whole,
    code_of,
    known,
    octets,
    refuse_pickles,
)

VERSION = re.compile(r"(.*?)(\d{1,12})")  # the name of a version's folder: what is the same for all, a number
MAX_INDEX = 1 << 28  # bytes
XOR, OVERWRITE, ZSTD, ADLER = "xor", "overwrite", "zstd", "adler32"
SHARD = "model-00000-of-00001.safetensors"
PACKAGES = {"xxh3-128": "xxhash", "blake3": "blake3"}  # what computes a checksum, where Python does not
Octets = npt.NDArray[np.uint8]


class _Index(NamedTuple):
    about: dict[str, Any]
    places: dict[str, str]  # of each tensor: its file

    @property
    def is_delta(self) -> bool:
        return "delta_encoding" in self.about


class IndexedDeltas:
    """One of them; ``begin`` and ``digits`` make the names of versions that are written."""

    def __init__(self, name: str, begin: str, digits: int, label: str = "") -> None:
        self.name, self._begin, self._digits, self._label = name, begin, digits, label

    def names(self, folder: Folder) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name, size in sorted(folder.sizes("").items()):
            if size is None and (match := VERSION.fullmatch(name)):
                found.setdefault(int(match[2]), []).append(name)
        return found

    def entries(self, folder: Folder, above: int) -> list[DeltaEntry]:
        names = self.names(folder)
        every = [name for own in names.values() for name in own]
        begins = {m[1]: name for name in every if (m := VERSION.fullmatch(name))}
        told = f"{folder.where} holds {' and '.join(sorted(begins.values())[:2])}, of two runs"
        require(len(begins) <= 1, InputError, f"{told}; give each run a folder of its own")
        found = (
            _entry(folder, number, own[0], number > above) for number, own in names.items() if number >= above
        )
        old = [DeltaEntry(number, None, own[0], ()) for number, own in names.items() if number < above]
        return old + [entry for entry in found if entry is not None]

    def read(self, folder: Folder, entry: DeltaEntry, held: Held, limit: int) -> dict[str, Bits]:
        where = f"{folder.where}/{entry.name}"
        index = _index(folder, entry.name)
        files = sorted(set(index.places.values())) if index is not None else [SINGLE]
        found: dict[str, Bits] = {}
        for file in files:
            raw = folder.read(f"{entry.name}/{file}", limit)
            entries, notes, begin = read_header(raw, len(raw))
            body = np.frombuffer(raw, np.uint8)[begin:]
            if index is not None and index.is_delta:
                found |= _Differences(index.about, notes, where).applied(entries, body, held)
            else:
                found |= {name: _bits(one, body) for name, one in entries.items()}
        for name in index.places if index is not None else ():
            told = f"{where} lacks {name}, which its index names; write it again"
            require(name in found, InputError, told)
        if index is None or not index.is_delta:
            check_whole(found, held, where)
        return found

    def place(self, number: int, whole: bool) -> str:
        return f"{self._begin}{number:0{self._digits}d}"

    def files(self, number: int, before: Held | None, after: Held) -> list[tuple[str, Pieces]]:
        folder = self.place(number, before is None)
        if before is None:
            names = ordered({name: itemsize(bits.kind) for name, bits in after.items()})
            told = ((n, code_of(n, b), list(b.shape), b.words.nbytes) for n in names for b in (after[n],))
            shard: Pieces = (header({"format": "pt"}, told), *(after[name].words for name in names))
            about: dict[str, Any] = {"total_size": sum(bits.words.nbytes for bits in after.values())}
        else:
            frames = {n: frame for n, b in sorted(after.items()) if (frame := _difference(before[n], b))}
            sums = {name: f"{zlib.adler32(octets(after[name].words).data):08x}" for name in frames}
            shard = header(sums, ((n, "U8", [len(f)], len(f)) for n, f in frames.items())), *frames.values()
            names, about = list(frames), self._about(number)
        index = {"metadata": about, "weight_map": dict.fromkeys(names, SHARD)}
        text = json.dumps(index, separators=(",", ":")).encode()
        return [(f"{folder}/{SHARD}", shard), (f"{folder}/{INDEX}", (text,))]

    def _about(self, number: int) -> dict[str, str]:
        own, base = (f"{self._label}{n:0{self._digits}d}" for n in (number, number - 1))
        coding = {"delta_encoding": XOR, "compression_format": ZSTD, "checksum_format": ADLER}
        return {"version": own, "base_version": base, **coding}


SLIME = IndexedDeltas("slime", "weight_v", 6)
MODELEXPRESS = IndexedDeltas("modelexpress", "v", 1, "v")


def _entry(folder: Folder, number: int, name: str, new: bool) -> DeltaEntry | None:
    """Return what a version's folder holds; None as long as it can be neither a delta nor a checkpoint."""
    where = f"{folder.where}/{name}"
    there = {file.rpartition("/")[2]: size for file, size in folder.sizes(name).items()}
    stamp = tuple(sorted(there.items()))
    if not new:
        return DeltaEntry(number, None, name, stamp)
    refuse_pickles(there, where)
    if INDEX not in there:  # what is written last; a checkpoint in one file has none
        return DeltaEntry(number, None, name, stamp) if SINGLE in there else None
    index = _index(folder, name)
    if index is None:
        return None
    lost = next((file for file in index.places.values() if file not in there), "")
    lacks = f"{where} lacks {lost}, which its index names; write it again" if lost else ""
    if not index.is_delta:
        return DeltaEntry(number, None, name, stamp, lacks)
    own, base = (_number(index.about.get(key), key, where) for key in ("version", "base_version"))
    told = f"{where} calls itself version {own}; let one run alone write to this folder"
    require(own == number, InputError, told)
    return DeltaEntry(number, base, name, stamp, lacks)


def _number(text: object, key: str, where: str) -> int:
    match = VERSION.fullmatch(str(text))
    if match is None:
        raise InputError(f"the index of {where} has {key} {text!r:.50}, which is no number; write it again")
    return int(match[2])


def _index(folder: Folder, name: str) -> _Index | None:
    """Return an index, None where there is none; ``PayloadError`` for one that is damaged."""
    try:
        data = folder.read(f"{name}/{INDEX}", MAX_INDEX)
    except FileNotFoundError:
        return None
    try:
        told = json.loads(data)
        about, places = dict(told.get("metadata") or {}), dict(told["weight_map"])
        good = all(isinstance(f, str) and f.endswith(SUFFIX) and "/" not in f for f in places.values())
    except (*WRONG_VALUES, RecursionError) as e:
        raise PayloadError(f"{folder.where}/{name}/{INDEX} is no index of a checkpoint") from e
    require(good, PayloadError, f"{folder.where}/{name}/{INDEX} names files elsewhere")
    return _Index(about, places)


def _bits(entry: TensorEntry, body: Octets) -> Bits:
    return Bits(entry.kind, entry.shape, body[entry.start : entry.stop].copy().view(WORDS[entry.kind]))


class _Differences:
    """The differences in one file, and how its version says that they are made."""

    def __init__(self, about: Mapping[str, Any], sums: Mapping[str, str], where: str) -> None:
        self._sums, self._where = sums, where
        self._coding, self._kind = str(about.get("delta_encoding")), str(about.get("checksum_format"))
        packed = str(about.get("compression_format"))
        for value, of in (
            (self._coding, (XOR, OVERWRITE)),
            (packed, (ZSTD,)),
            (self._kind, (ADLER, *PACKAGES)),
        ):
            told = f"{where} is coded by {value!r:.30}, which this does not read"
            require(value in of, InputError, f"{told}; choose {' or '.join(of)}")

    def applied(self, entries: Mapping[str, TensorEntry], body: Octets, held: Held) -> dict[str, Bits]:
        """Return the tensors that the file changes, as they are then."""
        found = {}
        for name, entry in entries.items():
            base = known(name, held, self._where)
            told = f"{name} is {entry.kind} in {self._where}, where a delta is bytes; write it again"
            require(entry.kind == "uint8" and len(entry.shape) == 1, InputError, told)
            new = self._applied(name, body[entry.start : entry.stop], octets(base.words))
            if _checksum(self._kind, new) != self._sums.get(name):
                raise InputError(
                    f"{name} in {self._where} does not have its checksum: it was made from another base, by "
                    "another run, or is damaged; give the run its own folder, and its first checkpoint here"
                )
            found[name] = Bits(base.kind, base.shape, new.view(base.words.dtype))
        return found

    def _applied(self, name: str, frame: Octets, old: Octets) -> Octets:
        most = old.size if self._coding == XOR else 4 + 5 * old.size
        size = zstd.content_size(frame)
        told = f"{name} has another size in {self._where}, where the base has {old.size} bytes"
        fits = size == most if self._coding == XOR else 0 <= size <= most
        require(fits, InputError, f"{told}; give the checkpoint that the run began with")
        plain = np.frombuffer(zstd.decompress(frame), np.uint8)
        if self._coding == XOR:
            return plain ^ old
        count = int.from_bytes(plain[:4].tobytes(), "little")
        good = plain.size == 4 + 5 * count
        places = plain[4 : 4 + 4 * count].copy().view("<u4") if good else np.zeros(0, np.uint32)
        good = good and (not count or int(places.max()) < old.size)
        require(good, PayloadError, f"{name} in {self._where} is no list of positions and bytes")
        new = old.copy()
        new[places] = plain[4 + 4 * count :]
        return new


def _difference(before: Bits, after: Bits) -> bytes:
    """Return a frame of what changed, nothing where nothing did."""
    diff = octets(before.words) ^ octets(after.words)
    return zstd.compress(diff) if diff.any() else b""


def _checksum(kind: str, data: Octets) -> str:
    if kind == ADLER:
        return f"{zlib.adler32(data.data):08x}"
    try:
        module: Any = importlib.import_module(PACKAGES[kind])
    except ImportError as e:
        needs = f"checksums {kind} need the package {PACKAGES[kind]}: pip install {PACKAGES[kind]}"
        raise MissingExtra(f"{needs}, or let the trainer write {ADLER}") from e
    make = module.xxh3_128 if kind == "xxh3-128" else module.blake3
    return str(make(data.tobytes() if kind == "blake3" else data).hexdigest())
