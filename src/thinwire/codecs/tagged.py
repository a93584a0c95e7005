"""Parts behind a tag, compressed where that makes them shorter: what ``Entropy`` writes and reads.

A part is one tag byte (bit 7: compressed; bit 6: range-coded; the rest: its dtype), then a frame of
``codecs.rans`` or of Zstandard (RFC 8878), or the bytes as they were. Values of several bytes are range-coded
as planes: all first bytes, then all second ones. A frame states its size, which is checked before anything is
allocated: against the bytes that the reader expects at most, and against ``FREE + RATIO * length``, beyond
which the encoder does not compress either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import rans, zstd
from thinwire.codecs.kernels.bits import aligned_nbytes, pack_aligned, unpack_aligned
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


@dataclass(frozen=True)
class Symbols:
    """A part to compress: its bytes, and the symbols that they are range-coded as."""

    data: Tensor  # uint8 [nbytes]
    symbols: Tensor  # uint8 [n]
    form: rans.Form
    tag: int

    @classmethod
    def of_codes(cls, codes: Tensor, bits: int) -> Symbols:
        """Return ``codes`` (uint8 [n], below 2**``bits``) in the aligned form; few of them one by one."""
        data = pack_aligned(codes, bits)
        if bits > 4 or codes.numel() > rans.STREAM:
            return cls(data, data, rans.Form(), 0)
        return cls(data, codes, rans.Form(bits=bits), 0)

    @classmethod
    def of(cls, part: Tensor, planes: int = 1, bits: int = 8) -> Symbols:
        """Return a part of any dtype; bytes may be several planes, or aligned codes of ``bits``."""
        data, size = as_bytes(part), part.element_size()
        if size > 1:
            return cls(data, data.view(-1, size).T.reshape(-1), rans.Form(size), tag_of(part))
        n = data.numel() * (8 // bits)
        if bits < 8 and n <= rans.STREAM:
            return cls(data, unpack_aligned(data, bits, n), rans.Form(bits=bits), tag_of(part))
        return cls(data, data, rans.Form(planes if data.numel() % planes == 0 else 1), tag_of(part))


def compress(part: Symbols, level: int, room: int) -> Tensor | None:
    """Return the tagged frame of a part, uint8, or None where it does not fit in less than ``room`` bytes.

    ``level`` is Zstandard's: from 2 on, it is tried for every part.
    """
    zstd.package()  # missing, it is missed at the first message, however short
    nbytes, device = part.data.numel(), part.data.device
    if nbytes < SMALLEST:
        return None
    symbols = rans.at_home(part.symbols) if nbytes <= SMALL else part.symbols
    found = rans.compress(symbols, part.form, room, bytes((_COMPRESSED | _RANGED | part.tag,)))
    length = room if found is None else found.numel()
    if level > 1 or nbytes <= SMALL or (found is not None and RUNS * length <= nbytes):
        shorter = _repetitions(part, level, length)
        found = found if shorter is None else shorter
    return None if found is None or nbytes > FREE + RATIO * found.numel() else found.to(device)


def _repetitions(part: Symbols, level: int, room: int) -> Tensor | None:
    """Return the frame by Zstandard where it takes fewer than ``room`` bytes."""
    frame = zstd.compress(rans.at_home(part.data).numpy(), level)
    if len(frame) + 1 >= room:
        return None
    return torch.frombuffer(bytearray((_COMPRESSED | part.tag,)) + frame, dtype=torch.uint8)


def store(part: Tensor) -> Tensor:
    """Return a part behind its tag, uint8, as it is."""
    tag = torch.full((1,), tag_of(part), dtype=torch.uint8, device=part.device)
    return torch.cat([tag, as_bytes(part)])


def expand(part: Tensor, bound: int) -> Tensor:
    """Return the part that was tagged, of at most ``bound`` bytes; ``PayloadError`` for anything else."""
    tag = _tag(part)
    if tag & _RANGED:
        raw = _ranged(part[1:], bound)
    else:
        raw = _unzipped(part[1:], bound) if tag & _COMPRESSED else part[1:]
    dtype = _DTYPES[tag & _KIND]
    if raw.numel() > bound or raw.numel() % dtype.itemsize:
        raise PayloadError(
            f"an entropy-coded part of {raw.numel()} bytes of {dtype}, expected at most {bound}"
        )
    if dtype.itemsize > 1 and tag & _RANGED:
        raw = raw.view(dtype.itemsize, -1).T.contiguous().view(-1)
    return raw if dtype == torch.uint8 else raw.clone().view(dtype)  # a clone begins at an aligned address


def expand_codes(part: Tensor, bits: int, n: int) -> Tensor | None:
    """Return ``n`` codes that a frame holds, uint8; None where a part is stored. Errors: ``PayloadError``."""
    tag = _tag(part)
    if not tag & _COMPRESSED:
        return None
    if tag & _RANGED:
        about = rans.opened(part[1:])
        if about.form.bits < 8:
            fits = about.form.bits == bits and about.n == n
            require(fits, PayloadError, f"{about.n} codes of {about.form.bits} bits, expected {n} of {bits}")
            return rans.decompress(part[1:], about)
    return unpack_aligned(expand(part, aligned_nbytes(n, bits)), bits, n)


def _tag(part: Tensor) -> int:
    if part.dtype != torch.uint8 or part.dim() != 1 or not part.numel():
        raise PayloadError(f"an entropy-coded part of {part.dtype} and shape {tuple(part.shape)}")
    tag = int(part[0])
    known = tag & _KIND < len(_DTYPES) and tag & (_COMPRESSED | _RANGED) != _RANGED
    require(known, PayloadError, f"unknown tag {tag} of an entropy-coded part")
    return tag


def _ranged(frame: Tensor, bound: int) -> Tensor:
    about = rans.opened(frame)
    size = aligned_nbytes(about.n, about.form.bits) if about.form.bits < 8 else about.n
    _check_size(size, frame.numel(), bound)
    found = rans.decompress(frame, about)
    return found if about.form.bits == 8 else pack_aligned(found, about.form.bits)


def _unzipped(frame: Tensor, bound: int) -> Tensor:
    data = rans.at_home(frame).numpy()
    _check_size(zstd.content_size(data), len(data), bound)
    raw = zstd.decompress(data)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(frame.device) if raw else frame[:0]


def _check_size(size: int, length: int, bound: int) -> None:
    fits = 0 <= size <= min(bound, FREE + RATIO * length)
    require(fits, PayloadError, f"a frame of {length} bytes claims {size}, expected at most {bound}")


def as_bytes(part: Tensor) -> Tensor:
    """Return the bytes of a flat part."""
    return part.contiguous().view(torch.uint8)


def tag_of(part: Tensor) -> int:
    """Return the tag of a stored part; ``InputError`` for a dtype that has none."""
    require(part.dtype in _DTYPES, InputError, f"values of {part.dtype} cannot be entropy-coded; cast them")
    return _DTYPES.index(part.dtype)
