"""The bytes of a cache: a head that says what follows, and the layers in order, some at a time.

Head: ``MAGIC``, the length of a note of JSON (u32, little-endian), its CRC-32 (u32), the note. For each basis
of the components, in order: the length of what follows and its CRC-32 (u64, u32), and what ``CacheRows``
wrote. A layer is ready when all that has a part of it has come.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.checksum import crc32
from thinwire.codecs.caches.cache_rows import CacheRows
from thinwire.codecs.caches.components import KEYS, VALUES, Basis, Components, LayerForm
from thinwire.codecs.caches.rotations import STILL, Rotation
from thinwire.dtypes import name_of
from thinwire.types import WRONG_VALUES, InputError, PayloadError, require

MAGIC = b"thinwire.kv\x01"
_NOTE, _PART = struct.Struct("<II"), struct.Struct("<QI")
MOST_NOTE = 1 << 16  # bytes
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}


class Kept(NamedTuple):
    """What a layer keeps: keys and values [heads, tokens, width] of its last tokens."""

    keys: Tensor
    values: Tensor


class CacheHead(NamedTuple):
    """What the head of a packed cache says: tokens seen, those that each layer keeps, dtype, and the code."""

    seen: int
    kept: tuple[int, ...]
    dtype: torch.dtype
    rows: CacheRows


class ArrivedLayer(NamedTuple):
    """A layer that is ready: its number, and what it keeps."""

    layer: int
    kept: Kept


def packed_parts(
    layers: Sequence[Kept], seen: int, components: Components, rows: CacheRows
) -> Iterator[bytes]:
    """Yield the head, then the parts, of what ``layers`` keep of ``seen`` tokens.

    Errors: ``InputError`` where these are not the layers that the components are of.
    """
    check_layers(layers, seen, components)
    dtype = name_of(layers[0].keys.dtype)
    yield _head(components, rows, seen, [kept.keys.shape[1] for kept in layers], dtype)
    for basis in components.bases:
        held = [layers[i].keys if kind == KEYS else layers[i].values for i, kind in basis.columns]
        counts = {x.shape[1] for x in held}
        told = f"layers {basis.layers} keep {sorted(counts)} tokens, and their components are of rows of one"
        require(len(counts) == 1, InputError, told)
        n = counts.pop()
        body = rows.encode(basis, turns(basis, components.layers), held, seen - n) if n else b""
        yield _PART.pack(len(body), crc32(body)) + body


def check_layers(layers: Sequence[Kept], seen: int, components: Components) -> None:
    """Raise ``InputError`` unless layers keep of ``seen`` tokens what components are made for."""
    wanted = len(components.layers)
    require(
        len(layers) == wanted, InputError, f"a cache of {len(layers)} layers, the components are of {wanted}"
    )
    most = components.tokens
    require(0 < seen <= most, InputError, f"a cache of {seen} tokens, expected 1..{most}")
    for i, (kept, form) in enumerate(zip(layers, components.layers, strict=True)):
        for x, width, what in ((kept.keys, form.key, KEYS), (kept.values, form.value, VALUES)):
            n = kept.keys.shape[1]
            good = tuple(x.shape) == (form.heads, n, width) and n <= seen
            told = f"{what} of layer {i} are {tuple(x.shape)}, expected ({form.heads}, up to {seen}, {width})"
            require(good, InputError, f"{told}: take the components of this model")
            good = x.dtype == layers[0].keys.dtype and name_of(x.dtype) in DTYPES
            told = f"{what} of layer {i} are of {x.dtype}, expected one of {', '.join(DTYPES)} in all layers"
            require(good, InputError, told)


def turns(basis: Basis, forms: Sequence[LayerForm]) -> list[Rotation]:
    """Return how each column of a basis is turned."""
    return [forms[i].rotation if kind == KEYS else STILL for i, kind in basis.columns]


def _head(components: Components, rows: CacheRows, seen: int, kept: list[int], dtype: str) -> bytes:
    note = {
        "components": components.digest.hex(),
        "seen": seen,
        "kept": kept,
        "dtype": dtype,
        "step": rows.step,
        "first": rows.first,
        "last": rows.last,
        "offset": rows.offset,
    }
    text = json.dumps(note, separators=(",", ":")).encode()
    return MAGIC + _NOTE.pack(len(text), crc32(text)) + text


class CacheReader:
    """Reads a packed cache as it comes: ``feed`` takes any next bytes and returns the layers they complete.

    A cache of more than ``most`` tokens, or than the model reads, is refused when its head has come.
    Errors: ``InputError`` for a cache of other components, ``PayloadError`` for bytes that are no cache, or
    damaged; after either, nothing more can be fed.
    """

    def __init__(self, components: Components, most: int | None = None) -> None:
        self.components = components
        self.most = components.tokens if most is None else min(most, components.tokens)
        self.head: CacheHead | None = None
        self._data, self._done, self._next = bytearray(), 0, 0
        self._columns: dict[tuple[int, str], Tensor] = {}

    @property
    def whole(self) -> bool:
        """Whether all layers have come."""
        return self._next == len(self.components.layers)

    def feed(self, data: bytes | bytearray | memoryview) -> list[ArrivedLayer]:
        """Take the next bytes; return the layers that are ready now, in order."""
        self._data += data
        require(not self.whole or not self._data, PayloadError, _beyond(len(self._data)))
        if self.head is None:
            self.head = self._opened()
        while self.head is not None and self._part(self.head):
            pass
        found = list(self._ready())
        require(not self.whole or not self._data, PayloadError, _beyond(len(self._data)))
        return found

    def close(self) -> None:
        """Raise ``PayloadError`` unless all layers have come."""
        of = len(self.components.layers)
        require(
            self.whole,
            PayloadError,
            f"a packed cache that ends after {self._next} of {of} layers: it was cut",
        )

    def _opened(self) -> CacheHead | None:
        begin = len(MAGIC) + _NOTE.size
        some = bytes(self._data[: len(MAGIC)])
        require(
            MAGIC.startswith(some), PayloadError, "it does not begin as a packed cache of this version does"
        )
        if len(self._data) < begin:
            return None
        length, check = _NOTE.unpack_from(self._data, len(MAGIC))
        require(length <= MOST_NOTE, PayloadError, f"the head of a packed cache of {length} bytes")
        if len(self._data) < begin + length:
            return None
        text = bytes(self._data[begin : begin + length])
        require(crc32(text) == check, PayloadError, "the head of a packed cache is damaged")
        del self._data[: begin + length]
        return head_of(text, self.components, self.most)

    def _part(self, head: CacheHead) -> bool:
        """Decode the next part, if all of it is there."""
        bases = self.components.bases
        if self._done == len(bases) or len(self._data) < _PART.size:
            return False
        basis = bases[self._done]
        length, check = _PART.unpack_from(self._data)
        n = head.kept[basis.layers[0]]
        most = 64 + 8 * n * basis.mean.numel() + 4096 * (1 + basis.deviations.numel())
        require(length <= most, PayloadError, f"a part of {length} bytes for {n} tokens, at most {most}")
        if len(self._data) < _PART.size + length:
            return False
        body = bytes(self._data[_PART.size : _PART.size + length])
        del self._data[: _PART.size + length]
        require(crc32(body) == check, PayloadError, f"part {self._done} of a packed cache is damaged")
        self._keep(head, basis, body, n)
        self._done += 1
        return True

    def _keep(self, head: CacheHead, basis: Basis, body: bytes, n: int) -> None:
        if n:
            about = n, head.seen - n
            found = head.rows.decode(basis, turns(basis, self.components.layers), body, about, head.dtype)
        else:
            require(not body, PayloadError, f"a part of {len(body)} bytes for no tokens")
            found = [torch.empty(w.shape[0], 0, w.shape[1], dtype=head.dtype) for w in basis.weights]
        self._columns |= dict(zip(basis.columns, found, strict=True))

    def _ready(self) -> Iterator[ArrivedLayer]:
        while not self.whole and {(self._next, k) for k in (KEYS, VALUES)} <= self._columns.keys():
            keys, values = (self._columns.pop((self._next, kind)) for kind in (KEYS, VALUES))
            self._next += 1
            yield ArrivedLayer(self._next - 1, Kept(keys, values))


def _beyond(n: int) -> str:
    return f"{n} bytes too many behind a packed cache"


def arrivals(
    reader: CacheReader, parts: Iterable[bytes], early: Iterable[ArrivedLayer] = ()
) -> Iterator[ArrivedLayer]:
    """Yield layers in order, ``early`` ones first, as bytes come. Errors: those of ``CacheReader``."""
    yield from early
    for part in parts:
        yield from reader.feed(part)
    reader.close()


def head_of(text: bytes, components: Components, most: int) -> CacheHead:
    """Return what a note says. Errors: ``InputError`` for other components, ``PayloadError`` for nonsense."""
    try:
        note = json.loads(text)
        mine, other = components.digest.hex(), str(note["components"])
        told = f"a cache packed with components {other[:8]}..., and these are {mine[:8]}..."
        require(other == mine, InputError, f"{told}; take those that it was packed with")
        return _checked(note, components, most)
    except InputError:
        raise
    except (*WRONG_VALUES, RecursionError) as e:
        raise PayloadError(f"the head of a packed cache says nothing of use: {str(e)[:80]}") from e


def _checked(note: Mapping[str, Any], components: Components, most: int) -> CacheHead:
    seen, kept = note["seen"], tuple(note["kept"])
    whole = all(type(n) is int for n in (seen, *kept)) and len(kept) == len(components.layers)
    fits = whole and 0 < seen <= most and all(0 <= n <= seen for n in kept)
    fits = fits and all(type(note[k]) is int and 0 <= note[k] < 1 << 31 for k in ("first", "last"))
    fits = fits and all(len({kept[i] for i in b.layers}) == 1 for b in components.bases)
    told = f"a head of {seen!r:.20} tokens, {str(kept)[:40]} kept, of at most {most}"
    require(fits, PayloadError, told)
    try:
        rows = CacheRows(note["step"], note["first"], note["last"], note["offset"])
    except InputError as e:
        raise PayloadError(f"the head of a packed cache: {e}") from e
    return CacheHead(seen, kept, DTYPES[note["dtype"]], rows)
