"""A patch: what takes a follower from one version of a state to another, or from nothing, as bytes.

::

    magic "TWSP", format u8, flags u8 (0), zero u16, crc32 u32 over all that follows
    base u64, version u64, base hash u64, hash u64, published f64, layout digest 16 bytes
    meta length u32, body length u64, meta (JSON), body (see ``body``); little-endian
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.checksum import crc32, joined
from thinwire.state.patches.pages import Pages
from thinwire.types import WRONG_VALUES, InputError, PayloadError, require

MAGIC = b"TWSP"
FORMAT = 3
HEAD = struct.Struct("<4sBBHI")
FIELDS = struct.Struct("<QQQQd16sIQ")
MAX_NBYTES = 1 << 36  # of a packed patch, unless the caller knows better
MAX_META = 1 << 16
MAX_VERSION = 1 << 53  # numbers below it are exact in JSON
MAX_TIME = 1 << 37  # seconds since the epoch: in the year 6325, which can still be written as a date

Meta = Mapping[str, str | int | float]
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Version:
    """A published version: its number (0: none, or a base that was never published), and what goes with it.

    ``hash`` is that of its contents; ``published`` is in seconds since the epoch, by the publisher's clock;
    ``meta`` is what ``publish`` was given; ``changed`` counts the elements that differ from the version
    before.
    """

    number: int = 0
    hash: int = 0
    published: float = 0.0
    meta: Meta = field(default_factory=dict)
    changed: int = 0


@dataclass(frozen=True)
class Patch:
    """From version ``base`` (0: from nothing, a keyframe) to ``version``, each with the hash of its contents.

    ``layout`` is the digest of the state's layout; ``published`` and ``meta`` are the version's, and ``crc``
    is the body's CRC-32, where it is known: nobody need compute it again.
    """

    base: int
    version: int
    base_hash: int
    hash: int
    published: float
    meta: Meta
    layout: str
    body: bytes | memoryview | Pages
    crc: int | None = field(default=None, compare=False)

    @property
    def target(self) -> Version:
        """The version it leads to."""
        return Version(self.version, self.hash, self.published, self.meta)

    @property
    def nbytes(self) -> int:
        """Bytes of the body."""
        return len(self.body)

    def head(self) -> bytes:
        """Return what comes before the body in the patch as bytes: whoever sends both need not join them."""
        return self.head_of(len(self.body), crc32(self._bytes()) if self.crc is None else self.crc)

    def head_of(self, nbytes: int, crc: int) -> bytes:
        """Return ``head()`` for a body of ``nbytes`` with this CRC-32, which need not be here."""
        meta = dump_meta(self.meta)
        digest = bytes.fromhex(self.layout)
        numbers = (self.base, self.version, self.base_hash, self.hash, self.published, digest)
        fields = FIELDS.pack(*numbers, len(meta), nbytes) + meta
        return HEAD.pack(MAGIC, FORMAT, 0, 0, joined(crc32(fields), crc, nbytes)) + fields

    def pack(self) -> bytes:
        """Return the patch as bytes."""
        return b"".join((self.head(), self._bytes()))

    def _bytes(self) -> bytes | memoryview:
        return self.body[:] if isinstance(self.body, Pages) else self.body

    @classmethod
    def unpack(cls, data: Buffer, max_nbytes: int = MAX_NBYTES) -> Patch:
        """Return the patch in ``data``.

        Errors: ``PayloadError`` for anything but the whole of one valid patch of at most ``max_nbytes``.
        """
        view = memoryview(data).cast("B")
        require(len(view) <= max_nbytes, PayloadError, f"a patch of {len(view)} bytes; at most {max_nbytes}")
        start = HEAD.size + FIELDS.size
        require(len(view) >= start, PayloadError, f"a patch of {len(view)} bytes is cut short")
        start += FIELDS.unpack_from(view, HEAD.size)[-2]
        return cls.join(view[:start], view[start:])

    @classmethod
    def join(cls, head: Buffer, body: Buffer | Pages) -> Patch:
        """Return the patch with this ``head()`` and body, which nobody may change. Errors: as ``unpack``."""
        view, start = memoryview(head), HEAD.size + FIELDS.size
        require(len(view) >= start, PayloadError, f"the head of a patch, {len(view)} bytes, is cut short")
        magic, form, flags, zero, crc = HEAD.unpack_from(view)
        require(magic == MAGIC, PayloadError, "not a patch of a thinwire state")
        known = form == FORMAT and not flags and not zero
        require(known, PayloadError, f"patch format {form} is not {FORMAT}; update the older end")
        *numbers, digest, n_meta, n_body = FIELDS.unpack_from(view, HEAD.size)
        lengths = n_meta <= MAX_META, start + n_meta == len(view), n_body == len(body)
        n = len(view) + len(body)
        require(all(lengths), PayloadError, f"a patch of {n} bytes is not as long as it says")
        own = body.crc if isinstance(body, Pages) else crc32(body)
        right = joined(crc32(view[HEAD.size :]), own, n_body) == crc
        require(right, PayloadError, "a patch's checksum does not match")
        meta = load_meta(bytes(view[start:]))
        kept = body if isinstance(body, bytes | Pages) else memoryview(body).toreadonly()
        return cls(*_checked(*numbers), meta, digest.hex(), kept, own)


def _checked(
    base: int, version: int, base_hash: int, new_hash: int, published: float
) -> tuple[int, int, int, int, float]:
    ordered = 0 <= base < version < MAX_VERSION
    require(ordered, PayloadError, f"a patch from version {base} to {version} leads nowhere")
    require(base > 0 or not base_hash, PayloadError, "a keyframe that needs a base")
    require(is_time(published), PayloadError, f"a version published at {published:g}")
    return base, version, base_hash, new_hash, published


def is_time(published: float) -> bool:
    """Return whether ``published``, in seconds since the epoch, can be told as a date.

    >>> is_time(1.7e9), is_time(1e308), is_time(float("nan"))
    (True, False, False)
    """
    return 0 <= published < MAX_TIME


def check_meta(meta: Any) -> dict[str, str | int | float]:
    """Return a copy of ``meta``.

    Errors: ``InputError`` unless it maps printable text to that (lines may break) or finite numbers: what one
    end says must not move the cursor of the other's terminal.
    """
    require(isinstance(meta, Mapping), InputError, f"meta is a {type(meta).__name__}, not a mapping")
    found = dict(meta)
    for key, value in found.items():
        ok = isinstance(key, str) and key.isprintable() and _plain(value)
        require(
            ok, InputError, f"meta {key!r:.99} = {value!r:.99}: plain text to that or finite numbers only"
        )
    n = len(json.dumps(found))
    require(n <= MAX_META, InputError, f"meta of {n} bytes; at most {MAX_META}")
    return found


def _plain(value: Any) -> bool:
    if type(value) is str:
        return value.isprintable() or all(line.isprintable() for line in value.replace("\t", " ").split("\n"))
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is bool or (type(value) is int and abs(value) < 1 << 64)


def dump_meta(meta: Meta) -> bytes:
    """Return ``meta`` as bytes. Errors: ``InputError``."""
    return json.dumps(check_meta(meta), separators=(",", ":")).encode()


def load_meta(data: bytes) -> dict[str, str | int | float]:
    """Return the meta data that ``dump_meta`` made bytes of. Errors: ``PayloadError``."""
    try:
        return check_meta(json.loads(data))
    except WRONG_VALUES as e:  # an InputError too
        raise PayloadError(f"the meta data of a patch: {str(e)[:200]}") from e
