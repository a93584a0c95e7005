"""Parts behind a tag, compressed where that makes them shorter: what ``Entropy`` writes and reads.

A part is one tag byte (bit 7: compressed; bit 6: range-coded; the rest: its dtype), then a frame of
``codecs.rans`` or of Zstandard (RFC 8878), or the bytes as they were. Values of several bytes are range-coded
as planes: all first bytes, then all second ones. A frame states its size, which is checked before anything is
allocated: against the bytes that the reader expects at most, and against ``FREE + RATIO * length``, beyond
which the encoder does not compress either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
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


@dataclass(frozen=True, eq=False)
class Symbols:
    """A part to compress: its bytes, and how they are range-coded."""

    part: Tensor  # what is stored if a frame is not shorter: packed, if it is ``codes``
    data: Tensor  # uint8 [nbytes]
    form: rans.Form
    tag: int
    codes: int | None = None  # bits of each

    @classmethod
    def of_codes(cls, codes: Tensor, bits: int) -> Symbols:
        """Return ``codes`` (uint8 [n], below 2**``bits``) in the aligned form; few of them one by one."""
        few = bits < 5 and codes.numel() <= rans.STREAM
        return cls(codes, pack_aligned(codes, bits), _form(1, bits if few else 8), 0, bits)

    @classmethod
    def of(cls, part: Tensor, planes: int = 1, bits: int = 8) -> Symbols:
        """Return a part of any dtype; bytes may be several planes, or aligned codes of ``bits``."""
        data, size, dtype = part.contiguous().view(torch.uint8), part.element_size(), part.dtype
        require(dtype in _TAGS, InputError, f"values of {dtype} cannot be entropy-coded; cast them")
        few = bits < 8 and data.numel() * (8 // bits) <= rans.STREAM
        planes = size if size > 1 else planes if data.numel() % planes == 0 else 1
        return cls(part, data, _form(1, bits) if few else _form(planes, 8), _TAGS[dtype])

    def symbols(self) -> Tensor:
        """Return what is range-coded, uint8 [n]."""
        if self.form.bits < 8:
            return self.part if self.codes else _digits(self.data, self.form.bits)
        size = self.part.element_size()
        return self.data if size == 1 else self.data.view(-1, size).T.reshape(-1)

    @property
    def room(self) -> int:
        """Bytes that the part takes as it is."""
        return self.data.numel() if self.codes is None else packed_nbytes(self.part.numel(), self.codes)

    def stored(self) -> Tensor:
        """Return the part behind its tag as it is, uint8."""
        data = self.data if self.codes is None else pack(self.part, self.codes)
        if data.is_cpu:
            return torch.frombuffer(bytearray((self.tag,)) + staging.memory(data), dtype=torch.uint8)
        tag = torch.full((1,), self.tag, dtype=torch.uint8, device=data.device)
        return torch.cat([tag, data])


_form = lru_cache(rans.Form)


def _digits(data: Tensor, bits: int) -> Tensor:
    """Return the codes that bytes of a CPU hold in the aligned form: as ``unpack_aligned``, for few."""
    shifts = np.arange(0, 8 - bits + 1, bits, dtype=np.uint8)[:, None]
    return torch.from_numpy((data.numpy() >> shifts & ((1 << bits) - 1)).reshape(-1))


def _bytes_of(digits: Tensor, bits: int) -> Tensor:
    """Return the bytes that codes of a CPU, as many as fill them, are in the aligned form."""
    shifts = np.arange(0, 8 - bits + 1, bits, dtype=np.uint8)[:, None]
    each = digits.numpy().reshape(len(shifts), -1)
    return torch.from_numpy(np.bitwise_or.reduce(each << shifts, axis=0))


def compressed(parts: Sequence[Symbols], level: int) -> tuple[Tensor, ...]:
    """Return each part, of one device, behind its tag: as a frame where that is shorter than the part.

    ``level`` is Zstandard's: from 2 on, it is tried for every part. A device is waited for once or twice:
    for parts whose way is through the CPU, and for the lengths of frames.
    """
    zstd.package()  # missing, it is missed at the first message, however short
    if not parts:
        return ()
    device, parts = parts[0].part.device, _some_at_home(parts)
    asked = [
        rans.Asked(p.symbols(), p.form, p.room, bytes((_COMPRESSED | _RANGED | p.tag,)))
        if p.data.numel() >= SMALLEST
        else None
        for p in parts
    ]
    frames = iter(rans.compress([a for a in asked if a is not None]))
    found = [
        p.stored() if a is None else _shortest(p, next(frames), level)
        for p, a in zip(parts, asked, strict=True)
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
        replace(p, part=near[id(p.part)], data=near[id(p.data)]) if goes else p
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
    nbytes = part.data.numel()
    length = part.room if frame is None else frame.numel()
    if level > 1 or nbytes <= SMALL or (frame is not None and RUNS * length <= nbytes):
        other = _repetitions(part, level, length)
        frame = frame if other is None else other
    return part.stored() if frame is None or nbytes > FREE + RATIO * frame.numel() else frame


def _repetitions(part: Symbols, level: int, room: int) -> Tensor | None:
    """Return the frame by Zstandard where it takes fewer than ``room`` bytes."""
    frame = zstd.compress(rans.at_home(part.data).numpy(), level)
    if len(frame) + 1 >= room:
        return None
    return torch.frombuffer(bytearray((_COMPRESSED | part.tag,)) + frame, dtype=torch.uint8)


class Arrived(NamedTuple):
    """A tagged part, and its first bytes on the CPU: all of them, if it is small."""

    part: Tensor
    near: Tensor

    @property
    def frame(self) -> Tensor:
        """What stands behind the tag, where it is known soonest."""
        return (self.part if self.near.numel() < self.part.numel() else self.near)[1:]


def arrived(parts: Sequence[Tensor]) -> list[Arrived]:
    """Return parts as ``expand`` takes them; ``PayloadError`` where they are not bytes.

    A device is waited for once, unless it is known what went there.
    """
    for part in parts:
        if part.dtype != torch.uint8 or part.dim() != 1 or not part.numel():
            raise PayloadError(f"an entropy-coded part of {part.dtype} and shape {tuple(part.shape)}")
    whole = [p.numel() <= SMALL or not triton_calls.there(p) for p in parts]  # there are kernels for the rest
    near = [
        p if p.is_cpu else _known(p, p.numel() if all_ else 1) for p, all_ in zip(parts, whole, strict=True)
    ]
    first = [p if all_ else p[: 1 + rans.HEAD] for p, all_ in zip(parts, whole, strict=True)]
    asked = iter(staging.to_host([f for f, n in zip(first, near, strict=True) if n is None]).tensors())
    return [Arrived(p, next(asked) if n is None else n) for p, n in zip(parts, near, strict=True)]


def _known(part: Tensor, n: int) -> Tensor | None:
    """Return the first ``n`` bytes of a part of a device, or more, where that is known on the CPU."""
    found = staging.known(part)
    return found if found is not None and found.numel() >= n else None


def expand(arrival: Arrived, bound: int) -> Tensor:
    """Return the part that was tagged, of at most ``bound`` bytes; ``PayloadError`` for anything else."""
    part, tag = arrival.part, _tag(arrival)
    if tag & _RANGED:
        raw = _ranged(arrival, bound)
    else:
        raw = _unzipped(arrival.frame, bound) if tag & _COMPRESSED else part[1:]
    if not part.is_cpu:
        (raw,) = _together([raw], part.device)
    dtype = _DTYPES[tag & _KIND]
    if raw.numel() > bound or raw.numel() % dtype.itemsize:
        raise PayloadError(
            f"an entropy-coded part of {raw.numel()} bytes of {dtype}, expected at most {bound}"
        )
    if dtype.itemsize > 1 and tag & _RANGED:
        raw = raw.view(dtype.itemsize, -1).T.contiguous().view(-1)
    return raw if dtype == torch.uint8 else raw.clone().view(dtype)  # a clone begins at an aligned address


def expand_codes(arrival: Arrived, bits: int, n: int) -> Tensor:
    """Return the ``n`` codes of ``bits`` that were tagged, uint8; ``PayloadError`` for anything else."""
    tag = _tag(arrival)
    if not tag & _COMPRESSED:
        return unpack(expand(arrival, packed_nbytes(n, bits)), bits, n)
    if tag & _RANGED:
        about = rans.opened(arrival.near[1:])
        if about.form.bits < 8:
            fits = about.form.bits == bits and about.n == n
            require(fits, PayloadError, f"{about.n} codes of {about.form.bits} bits, expected {n} of {bits}")
            return _together([rans.decompress(arrival.frame, about)], arrival.part.device)[0]
    return unpack_aligned(expand(arrival, aligned_nbytes(n, bits)), bits, n)


def _tag(arrival: Arrived) -> int:
    tag = int(arrival.near[0])
    known = tag & _KIND < len(_DTYPES) and tag & (_COMPRESSED | _RANGED) != _RANGED
    require(known, PayloadError, f"unknown tag {tag} of an entropy-coded part")
    return tag


def _ranged(arrival: Arrived, bound: int) -> Tensor:
    about = rans.opened(arrival.near[1:])
    size, rest = divmod(about.n, 8 // about.form.bits)
    require(not rest, PayloadError, f"{about.n} codes of {about.form.bits} bits, which end within a byte")
    _check_size(size, arrival.part.numel() - 1, bound)
    found = rans.decompress(arrival.frame, about)
    return found if about.form.bits == 8 else _bytes_of(found, about.form.bits)


def _unzipped(frame: Tensor, bound: int) -> Tensor:
    data = rans.at_home(frame).numpy()
    _check_size(zstd.content_size(data), len(data), bound)
    raw = zstd.decompress(data)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else frame[:0]


def _check_size(size: int, length: int, bound: int) -> None:
    if not 0 <= size <= min(bound, FREE + RATIO * length):
        raise PayloadError(f"a frame of {length} bytes claims {size}, expected at most {bound}")
