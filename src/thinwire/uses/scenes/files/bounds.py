"""What scene files of others claim, checked before a reader takes memory for it.

A file of a few kB can say that it holds millions of splats, or inflate to any size.
Source: https://github.com/nianticlabs/spz, its header up to version 3; version 4 as gaussforge writes it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from thinwire.types import PayloadError, require
from thinwire.uses.scenes.scene import COEFFICIENTS

FREE = 1 << 16  # splats that any file may have, besides one for each byte of it
PIECE, ROOM = 1 << 16, 1 << 16  # bytes: read at once, and that may be in an SPZ besides its splats
GZIP, MAGIC = b"\x1f\x8b", b"NGSP"
NEWEST = 4
NOTHING = "it holds no splats"
_HEAD = struct.Struct("<4sIIBBBB")  # magic, version, splats, bands, fraction, flags; streams in version 4
_PLACE, _STREAM = struct.Struct("<I"), struct.Struct("<QQ")  # of a table, and its rows: bytes packed and not
POSITIONS, TURNS = {1: 6}, {3: 4, 4: 4}  # bytes of them, where it is not 9 and 3
OTHERS = 7  # bytes of opacity, colours, scales
COEFFICIENT = 3  # bytes, one a colour
MOST_STREAMS = 64
MOST_HEADER = 1 << 16  # bytes of the header of a compressed .ply
CHUNK = 256  # splats of a compressed .ply that share their ranges
WIDTHS = {b"float": 4, b"uint": 4, b"uchar": 1}  # bytes of what such a file has


def check_claims(data: bytes, form: str) -> None:
    """Raise ``PayloadError`` where a file of this form claims more than its bytes can hold."""
    checks: dict[str, Callable[[bytes], None]] = {"spz": _spz, "compressed.ply": _compressed_ply}
    if form in checks:
        checks[form](data)


def _spz(data: bytes) -> None:
    packed = data[:2] == GZIP
    try:
        head = zlib.decompressobj(31).decompress(data[:PIECE], _HEAD.size) if packed else data[: _HEAD.size]
    except zlib.error as e:
        raise PayloadError(f"damaged: {e}") from e
    require(len(head) == _HEAD.size and head[:4] == MAGIC, PayloadError, "it does not begin as an SPZ does")
    _, version, count, bands, _, _, streams = _HEAD.unpack(head)
    told = f"SPZ version {version}, and this thinwire reads versions up to {NEWEST}; update thinwire"
    require(version <= NEWEST, PayloadError, told)
    require(packed == (version < NEWEST) and version > 0, PayloadError, f"SPZ version {version}: damaged")
    _count(count, len(data))
    most = max(COEFFICIENTS.values())
    require(bands <= most, PayloadError, f"{bands} bands of harmonics; {most} at most can be read")
    coefficients = next(n for n, found in COEFFICIENTS.items() if found == bands)
    each = POSITIONS.get(version, 9) + TURNS.get(version, 3) + OTHERS + COEFFICIENT * coefficients
    whole = count * each
    found = _inflated(data, whole + ROOM) if packed else _listed(data, streams)
    told = f"{count} splats take {whole} bytes unpacked, and there are {found}: damaged, or cut short"
    require(whole <= found <= whole + ROOM, PayloadError, told)


def _count(count: int, nbytes: int) -> None:
    require(count > 0, PayloadError, NOTHING)
    require(count <= FREE + nbytes, PayloadError, f"{count} splats in {nbytes} bytes cannot be")


def _inflated(data: bytes, most: int) -> int:
    """Return the bytes that a gzip holds, or more than ``most``, without keeping them."""
    inflater, found = zlib.decompressobj(31), 0
    try:
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            while piece and found <= most:
                found += len(inflater.decompress(piece, PIECE))
                piece = inflater.unconsumed_tail
    except zlib.error as e:
        raise PayloadError(f"damaged: {e}") from e
    return found


def _listed(data: bytes, streams: int) -> int:
    """Return the bytes that the table of a version 4 promises."""
    (at,) = _PLACE.unpack(data[16:20].ljust(4, b"\0"))
    end = at + streams * _STREAM.size
    good = 0 < streams <= MOST_STREAMS and at >= 20 and end <= len(data)
    require(good, PayloadError, f"{streams} streams at byte {at} of {len(data)}: damaged, or cut short")
    rows = list(_STREAM.iter_unpack(data[at:end]))
    packed = sum(row[0] for row in rows)
    told = f"streams of {packed} bytes in {len(data)}: damaged, or cut short"
    require(end + packed <= len(data), PayloadError, told)
    return sum(row[1] for row in rows)


def _compressed_ply(data: bytes) -> None:
    head, end, _ = data[:MOST_HEADER].partition(b"end_header")
    require(bool(end), PayloadError, "a header without an end")
    counts, nbytes, name = dict[bytes, int](), 0, b""
    for words in (line.split() for line in head.splitlines()):
        if words[:1] == [b"element"]:
            good = len(words) == 3 and words[2].isdigit() and len(words[2]) < 19 and words[1] not in counts
            require(good, PayloadError, f"a wrong element: {words!r:.60}")
            name, counts[words[1]] = words[1], int(words[2])
        elif words[:1] == [b"property"]:
            good = len(words) == 3 and words[1] in WIDTHS and bool(name)
            require(good, PayloadError, f"a property that cannot be read: {words!r:.60}")
            nbytes += counts[name] * WIDTHS[words[1]]
    splats, chunks = counts.get(b"vertex", 0), counts.get(b"chunk", 0)
    require(splats > 0, PayloadError, NOTHING)
    good = chunks == -(-splats // CHUNK) and counts.get(b"sh", splats) == splats
    told = f"{splats} splats in {chunks} chunks, with {counts.get(b'sh', splats)} harmonics: damaged"
    require(good, PayloadError, told)
    left = len(data) - len(head)
    told = f"elements of {nbytes} bytes in {left}: it was cut short, or its header is wrong"
    require(nbytes <= left, PayloadError, told)
