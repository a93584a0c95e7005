"""Packet <-> bytes: versioned, bounds-checked, no pickle. Little-endian; see docs/wire-format.md.

::

    magic "TW", version u8, flags u8 (0), crc32 u32 over all that follows
    dtype u8, dimensions u8, sections u8, 0 u8, entries u32, shape u32 each (the first is the entries' number)
    memory spec, references spec (u16 length, ASCII)
    entries: key u64, version u32, check u32, section u8
    sections: mode u8, parts u8, codec spec (u16 length, ASCII), part: dtype u8, length in values u32
    the parts' bytes, one after another
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.types import (
    MAX_KEY,
    Entry,
    InputError,
    Mode,
    Packet,
    Payload,
    PayloadError,
    Section,
    TensorSpec,
)

MAGIC = b"TW"
VERSION = 1
MAX_NBYTES = 1 << 28  # of the tensor a packet may describe, unless the caller knows better
MAX_DIMENSIONS = 8
MAX_SECTIONS = 4
MAX_PARTS = 16

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,  # of a frame's values alone: its parts are bits in bytes
)
CODES = {d: i for i, d in enumerate(DTYPES)}
PARTS = DTYPES[:-1]
HEAD = struct.Struct("<2sBBI")
BODY = struct.Struct("<BBBBI")
LENGTH = struct.Struct("<H")  # of a spec
SECTION = struct.Struct("<BBH")
ENTRY = np.dtype([("key", "<u8"), ("version", "<u4"), ("check", "<u4"), ("section", "u1")])


def pack(packet: Packet) -> bytes:
    """Return the packet as bytes."""
    spec = packet.spec
    out: list[bytes | memoryview] = []
    out.append(BODY.pack(CODES[spec.dtype], len(spec.shape), len(packet.sections), 0, len(packet.entries)))
    out.append(struct.pack(f"<{len(spec.shape)}I", *spec.shape))
    out += [_text(packet.memory), _text(packet.references)]
    rows = [(e.key, e.version, e.check, e.section) for e in packet.entries]
    out.append(np.array(rows, dtype=ENTRY).tobytes())
    for s in packet.sections:
        _check_parts(s)
        out.append(struct.pack("<BB", s.mode, len(s.payload.parts)) + _text(s.codec))
        out += [struct.pack("<BI", CODES[p.dtype], p.numel()) for p in s.payload.parts]
    out += [_bytes(p) for s in packet.sections for p in s.payload.parts]
    crc = 0
    for piece in out:
        crc = zlib.crc32(piece, crc)
    return b"".join([HEAD.pack(MAGIC, VERSION, 0, crc), *out])


def _check_parts(section: Section) -> None:
    parts = section.payload.parts
    wrong = next((p for p in parts if p.dim() != 1 or p.dtype not in PARTS), None)
    if len(parts) > MAX_PARTS:
        found = f"{len(parts)} parts"
    elif wrong is not None:
        found = f"a part of {wrong.dtype} and {wrong.dim()} dimensions"
    else:
        return
    raise InputError(
        f"{section.codec[:80]} made {found}; a packet holds at most {MAX_PARTS} flat tensors of "
        f"{', '.join(str(dtype).removeprefix('torch.') for dtype in PARTS)}"
    )


def _text(text: str) -> bytes:
    raw = text.encode("ascii")
    return LENGTH.pack(len(raw)) + raw


def _bytes(part: Tensor) -> memoryview:
    return part.detach().cpu().contiguous().view(torch.uint8).numpy().data


def unpack(data: bytes | bytearray | memoryview, max_nbytes: int = MAX_NBYTES) -> Packet:
    """Return the packet in ``data``.

    Errors: ``PayloadError`` for anything else than the whole of one valid packet, and for a packet whose
    tensor would take more than ``max_nbytes``; nothing is allocated beyond the size of ``data``.
    """
    reader = _PacketCursor(data)
    magic, version, flags, crc = reader.unpack(HEAD)
    if magic != MAGIC:
        raise PayloadError("not a thinwire packet")
    if version != VERSION or flags:
        raise PayloadError(f"wire version {version} is not {VERSION}; update the older end")
    if zlib.crc32(reader.data[HEAD.size :]) != crc:
        raise PayloadError("a packet's checksum does not match: it was damaged")
    dtype, dimensions, sections, zero, n = reader.unpack(BODY)
    if zero or not 0 < dimensions <= MAX_DIMENSIONS:
        raise PayloadError(f"a packet of {dimensions} dimensions")
    if not 0 < sections <= MAX_SECTIONS:
        raise PayloadError(f"a packet of {sections} sections")
    spec = TensorSpec(reader.unpack(struct.Struct(f"<{dimensions}I")), _dtype(dtype))
    if not 0 < n == spec.shape[0]:
        raise PayloadError(f"{n} entries for a tensor of shape {spec.shape}")
    # Zeros count as ones: an empty tensor could still claim any number of rows or channels.
    nbytes = math.prod([max(1, d) for d in spec.shape]) * spec.dtype.itemsize
    if nbytes > max_nbytes:
        raise PayloadError(f"a packet for {nbytes} bytes is over the limit of {max_nbytes}")
    memory, references = reader.text(*reader.unpack(LENGTH)), reader.text(*reader.unpack(LENGTH))
    entries, rows = _entries(reader, n, sections)
    heads = [_section_head(reader) for _ in range(sections)]
    found = []
    for (mode, codec, layout), k in zip(heads, rows, strict=True):
        parts = tuple([reader.tensor(d, length) for d, length in layout])
        found.append(Section(mode, codec, Payload(TensorSpec((k, *spec.shape[1:]), spec.dtype), parts)))
    if left := len(reader.data) - reader.at:
        raise PayloadError(f"{left} bytes too many behind a packet")
    return Packet(spec, memory, references, entries, tuple(found))


def _dtype(code: int) -> torch.dtype:
    if code >= len(DTYPES):
        raise PayloadError(f"unknown dtype code {code}")
    return DTYPES[code]


def _entries(reader: _PacketCursor, n: int, sections: int) -> tuple[tuple[Entry, ...], list[int]]:
    """Return the entries, and how many each section has."""
    raw = np.frombuffer(reader.take(n * ENTRY.itemsize), dtype=ENTRY)
    rows = np.bincount(raw["section"], minlength=sections).tolist()
    if len(rows) > sections or not all(rows):
        raise PayloadError("entries and sections of a packet do not match")
    keys = raw["key"].tolist()
    if len(set(keys)) < n or max(keys) >= MAX_KEY:
        raise PayloadError("keys of a packet that are not distinct")
    others = (raw[name].tolist() for name in ("version", "section", "check"))
    return tuple(map(Entry, keys, *others)), rows


def _section_head(reader: _PacketCursor) -> tuple[Mode, str, list[tuple[torch.dtype, int]]]:
    mode, parts, length = reader.unpack(SECTION)
    if mode not in Mode.__members__.values() or parts > MAX_PARTS:
        raise PayloadError(f"a section of mode {mode} with {parts} parts")
    codec = reader.text(length)
    found = reader.unpack(struct.Struct("<" + "BI" * parts))
    layout = [(_dtype(code), n) for code, n in zip(found[::2], found[1::2], strict=True)]
    if torch.bool in dict(layout):
        raise PayloadError("a part of truth values, which go as bits")
    return Mode(mode), codec, layout


class _PacketCursor:
    """A ``ByteCursor`` over a packet, here so that a packet is read in one place."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self.data, self.at = memoryview(data).cast("B"), 0

    def take(self, n: int) -> memoryview:
        self.at += n
        if self.at > len(self.data):
            raise PayloadError(f"a packet ends {self.at - len(self.data)} bytes too early: it was cut")
        return self.data[self.at - n : self.at]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def text(self, n: int) -> str:
        try:
            return bytes(self.take(n)).decode("ascii")
        except UnicodeDecodeError as e:
            raise PayloadError("a spec in a packet is not ASCII") from e

    def tensor(self, dtype: torch.dtype, n: int) -> Tensor:
        raw = bytearray(self.take(n * dtype.itemsize))  # a copy: aligned, writable, and free of the packet
        return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
