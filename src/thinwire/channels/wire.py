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

import numpy as np
import torch
from torch import Tensor

from thinwire.types import (
    MAX_KEY,
    ByteCursor,
    Entry,
    InputError,
    Mode,
    Packet,
    Payload,
    PayloadError,
    Section,
    TensorSpec,
    require,
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
    return struct.pack("<H", len(raw)) + raw


def _bytes(part: Tensor) -> memoryview:
    return part.detach().cpu().contiguous().view(torch.uint8).numpy().data


def unpack(data: bytes | bytearray | memoryview, max_nbytes: int = MAX_NBYTES) -> Packet:
    """Return the packet in ``data``.

    Errors: ``PayloadError`` for anything else than the whole of one valid packet, and for a packet whose
    tensor would take more than ``max_nbytes``; nothing is allocated beyond the size of ``data``.
    """
    reader = _PacketCursor(data, "a packet")
    magic, version, flags, crc = reader.unpack(HEAD)
    require(magic == MAGIC, PayloadError, "not a thinwire packet")
    require(
        version == VERSION and flags == 0,
        PayloadError,
        f"wire version {version} is not {VERSION}; update the older end",
    )
    require(
        zlib.crc32(reader.rest()) == crc, PayloadError, "a packet's checksum does not match: it was damaged"
    )
    dtype, dimensions, sections, zero, n = reader.unpack(BODY)
    require(
        zero == 0 and 0 < dimensions <= MAX_DIMENSIONS, PayloadError, f"a packet of {dimensions} dimensions"
    )
    require(0 < sections <= MAX_SECTIONS, PayloadError, f"a packet of {sections} sections")
    spec = TensorSpec(reader.unpack(struct.Struct(f"<{dimensions}I")), _dtype(dtype))
    require(0 < n == spec.shape[0], PayloadError, f"{n} entries for a tensor of shape {spec.shape}")
    # Zeros count as ones: an empty tensor could still claim any number of rows or channels.
    nbytes = math.prod(max(1, d) for d in spec.shape) * spec.dtype.itemsize
    require(
        nbytes <= max_nbytes, PayloadError, f"a packet for {nbytes} bytes is over the limit of {max_nbytes}"
    )
    memory, references = reader.text(), reader.text()
    entries = _entries(reader, n, sections)
    heads = [_section_head(reader) for _ in range(sections)]
    found = tuple(_section(reader, i, h, spec, entries) for i, h in enumerate(heads))
    reader.close()
    return Packet(spec, memory, references, entries, found)


def _dtype(code: int) -> torch.dtype:
    require(code < len(DTYPES), PayloadError, f"unknown dtype code {code}")
    return DTYPES[code]


def _entries(reader: _PacketCursor, n: int, sections: int) -> tuple[Entry, ...]:
    raw = np.frombuffer(reader.take(n * ENTRY.itemsize), dtype=ENTRY)
    entries = tuple(Entry(k, v, s, c) for k, v, c, s in raw.tolist())
    used = {e.section for e in entries}
    require(used == set(range(sections)), PayloadError, "entries and sections of a packet do not match")
    keys = {e.key for e in entries}
    require(len(keys) == n and max(keys) < MAX_KEY, PayloadError, "keys of a packet that are not distinct")
    return entries


_Head = tuple[Mode, str, list[tuple[torch.dtype, int]]]


def _section_head(reader: _PacketCursor) -> _Head:
    mode, parts = reader.unpack(struct.Struct("<BB"))
    require(
        mode in Mode.__members__.values() and parts <= MAX_PARTS,
        PayloadError,
        f"a section of mode {mode} with {parts} parts",
    )
    codec = reader.text()
    found = [reader.unpack(struct.Struct("<BI")) for _ in range(parts)]
    layout = [(_dtype(d), n) for d, n in found]
    require(all(d in PARTS for d, _ in layout), PayloadError, "a part of truth values, which go as bits")
    return Mode(mode), codec, layout


def _section(
    reader: _PacketCursor, index: int, head: _Head, spec: TensorSpec, entries: tuple[Entry, ...]
) -> Section:
    mode, codec, layout = head
    rows = sum(e.section == index for e in entries)
    parts = tuple(reader.tensor(dtype, n) for dtype, n in layout)
    return Section(mode, codec, Payload(TensorSpec((rows, *spec.shape[1:]), spec.dtype), parts))


class _PacketCursor(ByteCursor):
    def text(self) -> str:
        (n,) = self.unpack(struct.Struct("<H"))
        try:
            return bytes(self.take(n)).decode("ascii")
        except UnicodeDecodeError as e:
            raise PayloadError("a spec in a packet is not ASCII") from e

    def tensor(self, dtype: torch.dtype, n: int) -> Tensor:
        raw = bytearray(self.take(n * dtype.itemsize))  # a copy: aligned, writable, and free of the packet
        return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
