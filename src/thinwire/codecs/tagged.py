"""Parts behind a tag, compressed where that makes them shorter: what ``Entropy`` writes and reads.

A part is one tag byte (bit 7: compressed; bit 6: range-coded; the rest: its dtype), then a frame of
``codecs.rans`` or of Zstandard (RFC 8878), or the bytes as they were. Values of several bytes are range-coded
as planes: all first bytes, then all second ones. A frame states its size, which is checked before anything is
allocated: against the bytes that the reader expects at most, and against ``FREE + RATIO * length``, beyond
which the encoder does not compress either.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire import staging
from thinwire.codecs import rans, zstd
from thinwire.codecs.kernels import triton_calls
from thinwire.codecs.kernels.bits import (
    aligned_nbytes,
    pack,
    pack_aligned,
    packed_nbytes,
    unpack,
    unpack_aligned,
)
from thinwire.types import InputError, PayloadError, require

FREE = 1 << 24  # bytes a frame of any length may grow to
RATIO = 256
SMALLEST = 11  # bytes that a frame can make fewer: it takes 10 itself
SMALL = 1 << 13  # bytes up to which a part goes through the CPU, and Zstandard is tried beside
RUNS = 64  # and so it is where range coding leaves one byte in so many: then little but repetition is left
_COMPRESSED, _RANGED, _KIND = 0x80, 0x40, 0x3F
_DTYPES = (
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
)
_TAGS = {dtype: tag for tag, dtype in enumerate(_DTYPES)}


class Symbols(NamedTuple):
    """A part to compress: its bytes, and how they are range-coded."""

    part: Tensor  # what is stored if a frame is not shorter: packed, if it is ``codes``
    data: Tensor  # uint8 [nbytes]
    form: rans.Form
    how: int
    tag: int
    codes: int | None = None  # bits of each

    @classmethod
    def of_codes(cls, codes: Tensor, bits: int) -> Symbols:
        """Return ``codes`` (uint8 [n], below 2**``bits``) in the aligned form; few of them one by one."""
        few = bits < 5 and codes.numel() <= rans.STREAM
        form = rans.form_of(1, bits if few else 8)
        return cls(codes, pack_aligned(codes, bits), form, rans.AS_IT_IS, 0, bits)

    @classmethod
    def of(cls, part: Tensor, planes: int = 1, bits: int = 8) -> Symbols:
        """Return a part of any dtype; bytes may be several planes, or aligned codes of ``bits``."""
        dtype, size = part.dtype, part.element_size()
        require(dtype in _TAGS, InputError, f"values of {dtype} cannot be entropy-coded; cast them")
        data = part.contiguous() if dtype == torch.uint8 else part.contiguous().view(torch.uint8)
        if bits < 8 and data.numel() * (8 // bits) <= rans.STREAM:
            return cls(part, data, rans.form_of(1, bits), rans.PACKED, _TAGS[dtype])
        planes = size if size > 1 else planes if data.numel() % planes == 0 else 1
        how = size if size > 1 else rans.AS_IT_IS
        return cls(part, data, rans.form_of(planes, 8), how, _TAGS[dtype])

    def asked(self) -> rans.Asked:
        """Return what is range-coded."""
        one_by_one = self.codes is not None and self.form.bits < 8
        data = self.part.contiguous() if one_by_one else self.data
        return rans.Asked(data, self.form, self.room, _COMPRESSED | _RANGED | self.tag, self.how)

    @property
    def room(self) -> int:
        """Bytes that the part takes as it is."""
        return self.data.numel() if self.codes is None else packed_nbytes(self.part.numel(), self.codes)

    def stored(self) -> Tensor:
        """Return the part behind its tag as it is, uint8."""
        data = self.data if self.codes is None else pack(self.part, self.codes)
        if data.is_cpu:
            whole = bytes((self.tag,)) + ctypes.string_at(data.data_ptr(), data.numel())
            return torch.frombuffer(bytearray(whole), dtype=torch.uint8)
        tag = torch.full((1,), self.tag, dtype=torch.uint8, device=data.device)
        return torch.cat([tag, data])


def compressed(parts: Sequence[Symbols], level: int) -> tuple[Tensor, ...]:
    """Return each part, of one device, behind its tag: as a frame where that is shorter than the part.

    ``level`` is Zstandard's: from 2 on, it is tried for every part. A device is waited for once or twice:
    for parts whose way is through the CPU, and for the lengths of frames.
    """
    zstd.package()  # missing, it is missed at the first message, however short
    if not parts:
        return ()
    device = parts[0].part.device
    if device.type != "cpu":
        parts = _some_at_home(parts)
    asked = [p.asked() if p.data.numel() >= SMALLEST and rans.quick(p.data) else None for p in parts]
    frames = iter(rans.compress([a for a in asked if a is not None]))
    found = [
        _shortest(p, None if a is None else next(frames), level) for p, a in zip(parts, asked, strict=True)
    ]
    return _together(found, device)


def _some_at_home(parts: Sequence[Symbols]) -> list[Symbols]:
    """Return the parts, those on the CPU that are coded there: small ones, and all without kernels."""
    going = [not p.data.is_cpu and (p.data.numel() <= SMALL or not triton_calls.there(p.data)) for p in parts]
    if not any(going):
        return list(parts)
    there = {id(t): t for p, goes in zip(parts, going, strict=True) if goes for t in (p.part, p.data)}
    near = dict(zip(there, staging.to_host(list(there.values())).tensors(), strict=True))
    return [
        p._replace(part=near[id(p.part)], data=near[id(p.data)]) if goes else p
        for p, goes in zip(parts, going, strict=True)
    ]


def _together(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Return parts on ``device``: those on the CPU get there in one copy."""
    near = [] if device.type == "cpu" else [p for p in parts if p.is_cpu]
    if not near:
        return tuple(parts)
    layout = [(torch.uint8, p.numel()) for p in near]
    there = iter(staging.put_together([staging.memory(p) for p in near], layout, device))
    return tuple(next(there) if p.is_cpu else p for p in parts)


def _shortest(part: Symbols, frame: Tensor | None, level: int) -> Tensor:
    """Return a part behind its tag: as its frame of range coding, by Zstandard, or as it is."""
    nbytes = part.data.numel()
    if nbytes < SMALLEST:
        return part.stored()
    length = part.room if frame is None else frame.numel()
    if level > 1 or _repeats(part, frame):
        other = _repetitions(part, level, length)
        frame = frame if other is None else other
    return part.stored() if frame is None or nbytes > FREE + RATIO * frame.numel() else frame


def _repeats(part: Symbols, frame: Tensor | None) -> bool:
    """Return whether Zstandard may make a part shorter than its frame is.

    It does where much repeats, and sometimes where range coding saves nothing because its table is long.
    """
    if not rans.quick(part.data):
        return True
    nbytes = part.data.numel()
    if nbytes > SMALL:
        return frame is not None and RUNS * frame.numel() <= nbytes
    if frame is None and part.form.bits == 8:
        return True
    first = nbytes // part.form.planes if part.how == rans.AS_IT_IS else nbytes  # others are mostly zeros
    return rans.repeated(part.data, first)


def _repetitions(part: Symbols, level: int, room: int) -> Tensor | None:
    """Return the frame by Zstandard where it takes fewer than ``room`` bytes."""
    frame = zstd.compress(rans.at_home(part.data).numpy(), level)
    if len(frame) + 1 >= room:
        return None
    return torch.frombuffer(bytearray((_COMPRESSED | part.tag,)) + frame, dtype=torch.uint8)


class Arrived(NamedTuple):
    """A tagged part, its first bytes on the CPU: all of them, if it is small; and their memory."""

    part: Tensor
    near: Tensor
    bytes: memoryview

    @property
    def soonest(self) -> Tensor:
        """The tag and what stands behind it, where it is known soonest."""
        return self.part if self.near.numel() < self.part.numel() else self.near


def arrived(parts: Sequence[Tensor]) -> list[Arrived]:
    """Return parts as ``expand`` takes them; ``PayloadError`` where they are not bytes.

    A device is waited for once, unless it is known what went there.
    """
    for part in parts:
        if part.dtype != torch.uint8 or part.dim() != 1 or not part.numel():
            raise PayloadError(f"an entropy-coded part of {part.dtype} and shape {tuple(part.shape)}")
    if all(p.is_cpu for p in parts):
        return [Arrived(p, p, staging.memory(p)) for p in parts]
    whole = [p.numel() <= SMALL or not triton_calls.there(p) for p in parts]  # there are kernels for the rest
    near = [
        p if p.is_cpu else _known(p, p.numel() if all_ else 1) for p, all_ in zip(parts, whole, strict=True)
    ]
    first = [p if all_ else p[: 1 + rans.HEAD] for p, all_ in zip(parts, whole, strict=True)]
    asked = iter(staging.to_host([f for f, n in zip(first, near, strict=True) if n is None]).tensors())
    found = [next(asked) if n is None else n for n in near]
    return [Arrived(p, n, staging.memory(n)) for p, n in zip(parts, found, strict=True)]


def _known(part: Tensor, n: int) -> Tensor | None:
    """Return the first ``n`` bytes of a part of a device, or more, where that is known on the CPU."""
    found = staging.known(part)
    return found if found is not None and found.numel() >= n else None


def expand(arrival: Arrived, bound: int) -> Tensor:
    """Return the part that was tagged, of at most ``bound`` bytes; ``PayloadError`` for anything else."""
    part, tag = arrival.part, _tag(arrival)
    dtype = _DTYPES[tag & _KIND]
    if not tag & _COMPRESSED and part.is_cpu and dtype.itemsize < part.numel() <= SMALL:
        raw = torch.frombuffer(bytearray(arrival.bytes[1:]), dtype=torch.uint8)  # which begins where any may
    elif tag & _RANGED:
        raw = _ranged(arrival, bound, dtype.itemsize)
    else:
        raw = _unzipped(arrival.soonest[1:], bound) if tag & _COMPRESSED else part[1:]
    if not part.is_cpu:
        (raw,) = _together([raw], part.device)
    if raw.numel() > bound or raw.numel() % dtype.itemsize:
        raise PayloadError(
            f"an entropy-coded part of {raw.numel()} bytes of {dtype}, expected at most {bound}"
        )
    if dtype == torch.uint8:
        return raw
    apart = raw.storage_offset() % dtype.itemsize == 0 == raw.data_ptr() % dtype.itemsize
    return (raw if apart else raw.clone()).view(dtype)  # a clone begins at an aligned address


def expand_codes(arrival: Arrived, bits: int, n: int) -> Tensor:
    """Return the ``n`` codes of ``bits`` that were tagged, uint8; ``PayloadError`` for anything else."""
    tag = _tag(arrival)
    if not tag & _COMPRESSED:
        return unpack(expand(arrival, packed_nbytes(n, bits)), bits, n)
    if tag & _RANGED:
        about = rans.opened(arrival.bytes[1:])
        if about.form.bits < 8:
            fits = about.form.bits == bits and about.n == n
            require(fits, PayloadError, f"{about.n} codes of {about.form.bits} bits, expected {n} of {bits}")
            return _together([rans.decompress(arrival.soonest, about, start=1)], arrival.part.device)[0]
    return unpack_aligned(expand(arrival, aligned_nbytes(n, bits)), bits, n)


def _tag(arrival: Arrived) -> int:
    tag = arrival.bytes[0]
    known = tag & _KIND < len(_DTYPES) and tag & (_COMPRESSED | _RANGED) != _RANGED
    require(known, PayloadError, f"unknown tag {tag} of an entropy-coded part")
    return tag


def _ranged(arrival: Arrived, bound: int, itemsize: int) -> Tensor:
    about = rans.opened(arrival.bytes[1:])
    size, rest = divmod(about.n, 8 // about.form.bits)
    require(not rest, PayloadError, f"{about.n} codes of {about.form.bits} bits, which end within a byte")
    _check_size(size, arrival.part.numel() - 1, bound)
    how = rans.PACKED if about.form.bits < 8 else rans.AS_IT_IS if itemsize == 1 else itemsize
    require(about.n % max(1, how) == 0, PayloadError, f"{about.n} bytes of values of {itemsize} each")
    return rans.decompress(arrival.soonest, about, how, 1)


def _unzipped(frame: Tensor, bound: int) -> Tensor:
    data = rans.at_home(frame).numpy()
    _check_size(zstd.content_size(data), len(data), bound)
    raw = zstd.decompress(data)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else frame[:0]


def _check_size(size: int, length: int, bound: int) -> None:
    if not 0 <= size <= min(bound, FREE + RATIO * length):
        raise PayloadError(f"a frame of {length} bytes claims {size}, expected at most {bound}")
