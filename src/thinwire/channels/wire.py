"""Packet <-> bytes: versioned, bounds-checked, no pickle. Little-endian; see docs/wire-format.md.

::

    magic "TW", version u8, flags u8, crc32 u32 over all that follows; flag 1: none, so it is 0
    dtype u8, dimensions u8, sections u8, 0 u8, entries u32, shape u32 each (the first is the entries' number)
    memory spec, references spec (u16 length, ASCII)
    entries: key u64, version u32, check u32, section u8
    sections: mode u8, parts u8, codec spec (u16 length, ASCII), part: dtype u8, length in values u32
    the parts' bytes, one after another
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire import staging
from thinwire.channels.entries import ENTRY, Entries
from thinwire.checksum import crc32
from thinwire.staging import Data
from thinwire.types import InputError, Mode, Packet, Payload, PayloadError, Section, TensorSpec

MAGIC = b"TW"
VERSION = 1
UNSUMMED = 1  # flag of a packet without a check sum, for links: they have their own
MAX_NBYTES = 1 << 28  # of the tensor a packet may describe, unless the caller knows better
MAX_DIMENSIONS = 8
MAX_SECTIONS = 4
MAX_PARTS = 16
REMEMBERED = 2048  # bytes: what is longer at the head of a packet is read anew each time

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
TRUTH = len(PARTS)  # the code of no part's dtype, nor any above
HEAD = struct.Struct("<2sBBI")
BODY = struct.Struct("<BBBBI")
LENGTH = struct.Struct("<H")  # of a spec
SECTION = struct.Struct("<BBH")
_SHAPES = [struct.Struct(f"<{n}I") for n in range(MAX_DIMENSIONS + 1)]
_PARTS = [struct.Struct("<" + "BI" * n) for n in range(MAX_PARTS + 1)]  # dtype and length of each
_MODES = {int(mode): mode for mode in Mode}


def pack(packet: Packet) -> bytes:
    """Return the packet as bytes of their own. Errors: as of ``packed``."""
    data = packed(packet)
    return data if isinstance(data, bytes) else bytes(data)


def packed(packet: Packet, lead: int = 0, summed: bool = True) -> bytes | memoryview:
    """Return the packet as bytes; one of a device in the memory that it crossed to, for the link to send.

    It crosses in one copy, which is waited for here, and nothing copies it again. ``lead``: of a device, so
    many bytes before the packet are the caller's to write, and are returned with it. ``summed``: with a check
    sum, which a packet that only crosses a link does not need.
    Errors: ``InputError`` for parts that no packet can hold, and whatever was found wrong on the device with
    the values in it: the keys' next message is then one that needs no reference.
    """
    parts, layout, here = _parts(packet)
    return _summed(packet, parts, layout, summed) if here else packing([packet], lead, summed)()[0]


def packing(
    packets: Sequence[Packet], lead: int = 0, summed: bool = True
) -> Callable[[], list[bytes | memoryview]]:
    """Begin to pack the packets of a message, and return what waits for it: the bytes of each, as ``packed``.

    All that is on a device sets out in one copy, behind what this thread has queued there. ``lead`` is of a
    packet that is alone.
    """
    data: list[bytes | memoryview] = [b""] * len(packets)
    away = dict[int, _Leaving]()
    for i, packet in enumerate(packets):
        parts, layout, here = _parts(packet)
        if here:
            data[i] = _summed(packet, parts, layout, summed)
        else:
            away[i] = _Leaving(packet, parts, layout)
    alone = len(away) == len(packets) == 1
    room = lead + HEAD.size + _head_nbytes(packets[0]) if alone else 0
    crossing = [part for one in away.values() for part in one.crossing]
    staged = staging.to_host(crossing, room, align=1 if alone else staging.ALIGNMENT)

    def wait() -> list[bytes | memoryview]:
        if alone:
            return [away[0].in_place(staged, room, lead, summed)]
        crossed = iter(zip(staged.views(), staged.tensors(), strict=True)) if away else iter(())
        for i, one in away.items():
            data[i] = one.joined(crossed, summed)
        return data

    return wait


def _parts(packet: Packet) -> tuple[list[Tensor], list[int], bool]:
    """Return the parts of a packet, dtype and length of each, and whether all that it says is on the host."""
    parts, layout, here = list[Tensor](), list[int](), packet.verdicts is None
    for section in packet.sections:
        own = section.payload.parts
        for part in own:
            code = CODES.get(part.dtype, TRUTH)
            if code >= TRUTH or part.dim() != 1 or len(own) > MAX_PARTS:
                raise _unfit(section)
            layout += code, part.numel()
            here = here and part.is_cpu
        parts += own
    return parts, layout, here


def _summed(packet: Packet, parts: list[Tensor], layout: list[int], summed: bool) -> bytes:
    """Return a packet of the host as bytes."""
    pieces: list[Data] = [_head(packet, layout), *map(staging.memory, parts)]
    return b"".join([_summary(pieces, summed), *pieces])


def _summary(pieces: Sequence[Data], summed: bool) -> bytes:
    """Return what stands before the pieces of a packet."""
    crc = 0
    for piece in pieces if summed else ():
        crc = crc32(piece, crc)
    return HEAD.pack(MAGIC, VERSION, 0 if summed else UNSUMMED, crc)


class _Leaving:
    """A packet of a device, and what of it crosses: its parts, and what is asked about them."""

    def __init__(self, packet: Packet, parts: list[Tensor], layout: list[int]) -> None:
        self.packet, self._layout = packet, layout
        self._entries, self._verdicts = Entries.of(packet.entries), packet.verdicts
        self._parts = len(parts)
        asked = [] if self._entries.sums is None else [self._entries.sums]
        asked += [] if self._verdicts is None else self._verdicts.tensors()
        self.crossing = [*parts, *asked]

    def in_place(self, staged: staging.Staged, lead: int, before: int, summed: bool) -> memoryview:
        """Return the packet in the memory that it was copied to, its head written before the parts."""
        data, start = staged.wait(), before + HEAD.size
        self._answered(staged.tensors(self._parts))
        end = lead + sum(part.nbytes for part in self.crossing[: self._parts])
        data[start:lead] = _head(self.packet, self._layout)
        data[before:start] = _summary([data[start:end]], summed)
        return data[:end]

    def joined(self, crossed: Iterator[tuple[memoryview, Tensor]], summed: bool) -> bytes:
        """Return the packet from what has crossed of it, the next of all that has."""
        own = [next(crossed) for _ in self.crossing]
        self._answered([tensor for _, tensor in own[self._parts :]])
        views = [view for view, _ in own[: self._parts]]
        pieces: list[Data] = [_head(self.packet, self._layout), *views]
        return b"".join([_summary(pieces, summed), *pieces])

    def _answered(self, read: list[Tensor]) -> None:
        """Take what was asked, on the host: checks and findings."""
        if self._entries.sums is not None:
            self._entries.checked(read.pop(0))
        if self._verdicts is not None:
            self._verdicts.settle(read)


def _head(packet: Packet, layout: list[int]) -> bytes:
    """Return what stands before the parts of ``layout``, each its dtype and length, without the check sum."""
    pieces = [_front(*_frame(packet)), Entries.of(packet.entries).pack()]
    at = 0
    for s in packet.sections:
        n = len(s.payload.parts)
        pieces += _section_front(s.mode, n, s.codec), _PARTS[n].pack(*layout[at : at + 2 * n])
        at += 2 * n
    return b"".join(pieces)


def _frame(packet: Packet) -> tuple[tuple[int, ...], torch.dtype, str, str, int]:
    return packet.spec.shape, packet.spec.dtype, packet.memory, packet.references, len(packet.sections)


def _head_nbytes(packet: Packet) -> int:
    front = _front(*_frame(packet))
    heads = sum(SECTION.size + len(s.codec) + 5 * len(s.payload.parts) for s in packet.sections)
    return len(front) + ENTRY.itemsize * len(packet.entries) + heads


@lru_cache(maxsize=256)
def _front(shape: tuple[int, ...], dtype: torch.dtype, memory: str, references: str, sections: int) -> bytes:
    body = BODY.pack(CODES[dtype], len(shape), sections, 0, shape[0])
    return b"".join([body, _SHAPES[len(shape)].pack(*shape), _text(memory), _text(references)])


@lru_cache(maxsize=256)
def _section_front(mode: Mode, parts: int, codec: str) -> bytes:
    return bytes((mode, parts)) + _text(codec)


def _unfit(section: Section) -> InputError:
    parts = section.payload.parts
    found = f"{len(parts)} parts"
    if len(parts) <= MAX_PARTS:
        wrong = next(p for p in parts if p.dim() != 1 or p.dtype not in PARTS)
        found = f"a part of {wrong.dtype} and {wrong.dim()} dimensions"
    return InputError(
        f"{section.codec[:80]} made {found}; a packet holds at most {MAX_PARTS} flat tensors of "
        f"{', '.join(str(dtype).removeprefix('torch.') for dtype in PARTS)}"
    )


def _text(text: str) -> bytes:
    raw = text.encode("ascii")
    return LENGTH.pack(len(raw)) + raw


def unpack(
    data: Data, max_nbytes: int = MAX_NBYTES, device: torch.device | str = "cpu", summed: bool = True
) -> Packet:
    """Return the packet in ``data``, its parts on ``device``: there in one copy.

    ``summed``: whether it must have a check sum; one that came over a link need not.
    Errors: ``PayloadError`` for anything else than the whole of one valid packet, and for a packet whose
    tensor would take more than ``max_nbytes``; nothing is allocated beyond the size of ``data``.
    """
    return unpack_all([data], max_nbytes, device, summed)[0]


def unpack_all(
    data: Sequence[Data],
    max_nbytes: int = MAX_NBYTES,
    device: torch.device | str = "cpu",
    summed: bool = True,
) -> list[Packet]:
    """Return the packet in each of ``data``, the parts of all on ``device`` in one copy; as ``unpack``."""
    opened = [_open(one, max_nbytes, summed) for one in data]
    layout = [form for one in opened for _, own in one.heads for form in own]
    parts = iter(staging.put_together([piece for one in opened for piece in one.pieces], layout, device))
    return [_packet(one, parts) for one in opened]


def _open(data: Data, max_nbytes: int, summed: bool) -> _Opened:
    """Read all of a packet but its parts."""
    reader = _PacketCursor(data)
    magic, version, flags, crc = reader.unpack(HEAD)
    if magic != MAGIC:
        raise PayloadError("not a thinwire packet")
    if version != VERSION or flags > UNSUMMED or (flags and summed):
        raise PayloadError(f"wire version {version} is not {VERSION}; update the older end")
    if not flags and crc32(reader.data[HEAD.size :]) != crc:
        raise PayloadError("a packet's checksum does not match: it was damaged")
    front = _read_front(reader)
    n, sections = front.spec.shape[0], front.sections
    if front.nbytes > max_nbytes:
        raise PayloadError(f"a packet for {front.nbytes} bytes is over the limit of {max_nbytes}")
    entries, rows = Entries.unpack(reader.take(n * ENTRY.itemsize), sections)
    heads = [_section_head(reader) for _ in range(sections)]
    pieces = [reader.take(length * dtype.itemsize) for _, own in heads for dtype, length in own]
    if left := len(reader.data) - reader.at:
        raise PayloadError(f"{left} bytes too many behind a packet")
    return _Opened(front, entries, rows, heads, pieces)


def _packet(opened: _Opened, parts: Iterator[Tensor]) -> Packet:
    """Return a packet that has the next of ``parts``."""
    front, found = opened.front, []
    spec, n = front.spec, front.spec.shape[0]
    for (head, own), k in zip(opened.heads, opened.rows, strict=True):
        own_spec = spec if k == n else TensorSpec((k, *spec.shape[1:]), spec.dtype)
        payload = Payload(own_spec, tuple([next(parts) for _ in own]))
        found.append(Section(head.mode, head.codec, payload))
    return Packet(spec, front.memory, front.references, opened.entries, tuple(found))


class Front(NamedTuple):
    """What stands before the entries."""

    spec: TensorSpec
    sections: int
    memory: str
    references: str
    nbytes: int  # of the tensor; zeros of its shape count as ones


def _read_front(reader: _PacketCursor) -> Front:
    """Return what stands before the entries: the same in each packet of a channel, and so read once."""
    start, data = reader.at, reader.data
    reader.take(BODY.size)
    end = reader.at + 4 * data[start + 1]  # behind the shape; the second byte is its dimensions
    for _ in ("memory", "references"):
        if end + LENGTH.size <= len(data):
            end += LENGTH.unpack_from(data, end)[0]
        end += LENGTH.size
    reader.take(end - reader.at)
    raw = bytes(data[start:end])
    return _known_front(raw) if len(raw) <= REMEMBERED else _parsed_front(raw)


def _parsed_front(raw: bytes) -> Front:
    reader = _PacketCursor(raw)
    dtype, dimensions, sections, zero, n = reader.unpack(BODY)
    if zero or not 0 < dimensions <= MAX_DIMENSIONS:
        raise PayloadError(f"a packet of {dimensions} dimensions")
    if not 0 < sections <= MAX_SECTIONS:
        raise PayloadError(f"a packet of {sections} sections")
    spec = TensorSpec(reader.unpack(_SHAPES[dimensions]), _dtype(dtype))
    if not 0 < n == spec.shape[0]:
        raise PayloadError(f"{n} entries for a tensor of shape {spec.shape}")
    # Zeros count as ones: an empty tensor could still claim any number of rows or channels.
    nbytes = math.prod([max(1, d) for d in spec.shape]) * spec.dtype.itemsize
    memory, references = reader.text(*reader.unpack(LENGTH)), reader.text(*reader.unpack(LENGTH))
    return Front(spec, sections, memory, references, nbytes)


_known_front = lru_cache(maxsize=256)(_parsed_front)


def _dtype(code: int) -> torch.dtype:
    if code >= len(DTYPES):
        raise PayloadError(f"unknown dtype code {code}")
    return DTYPES[code]


class SectionHead(NamedTuple):
    """What stands before the layout of a section's parts."""

    mode: Mode
    codec: str
    parts: int


class _Opened(NamedTuple):
    """A packet whose parts are still the bytes that they came as."""

    front: Front
    entries: Entries
    rows: list[int]  # of each section
    heads: list[tuple[SectionHead, list[tuple[torch.dtype, int]]]]
    pieces: list[memoryview]


def _section_head(reader: _PacketCursor) -> tuple[SectionHead, list[tuple[torch.dtype, int]]]:
    start = reader.at
    _, _, length = reader.unpack(SECTION)
    reader.take(length)
    raw = bytes(reader.data[start : reader.at])
    head = _known_section(raw) if len(raw) <= REMEMBERED else _parsed_section(raw)
    found = reader.unpack(_PARTS[head.parts])
    return head, list(zip(_part_dtypes(found[::2]), found[1::2], strict=True))


def _parsed_section(raw: bytes) -> SectionHead:
    reader = _PacketCursor(raw)
    mode, parts, length = reader.unpack(SECTION)
    if mode not in _MODES or parts > MAX_PARTS:
        raise PayloadError(f"a section of mode {mode} with {parts} parts")
    return SectionHead(_MODES[mode], reader.text(length), parts)


_known_section = lru_cache(maxsize=256)(_parsed_section)


@lru_cache(maxsize=256)
def _part_dtypes(codes: tuple[int, ...]) -> list[torch.dtype]:
    found = [_dtype(code) for code in codes]
    if torch.bool in found:
        raise PayloadError("a part of truth values, which go as bits")
    return found


class _PacketCursor:
    """A ``ByteCursor`` over a packet, here so that a packet is read in one place."""

    def __init__(self, data: Data) -> None:
        self.data, self.at = memoryview(data).cast("B"), 0

    def take(self, n: int) -> memoryview:
        at = self.at
        self.at = end = at + n
        if end > len(self.data):
            raise PayloadError(f"a packet ends {end - len(self.data)} bytes too early: it was cut")
        return self.data[at:end]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def text(self, n: int) -> str:
        try:
            return bytes(self.take(n)).decode("ascii")
        except UnicodeDecodeError as e:
            raise PayloadError("a spec in a packet is not ASCII") from e
