"""Range-coded symbols: frames that a CPU and a GPU read and write alike, for noise of uneven odds.

A frame is a byte of its form (bits 0 and 1: log2 of the planes; bits 4 to 7: the bits of a symbol), the
number of symbols (seven bits a byte, the lowest first, bit 7: more follow), and a body (see ``grid``).
Symbols of less than 8 bits, of which there are at most ``STREAM``, are codes that ``pack_aligned`` would put
several to a byte: few of them are cheaper with a short table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire import staging
from thinwire.codecs.kernels import triton_calls
from thinwire.codecs.rans import lanes, rans_calls
from thinwire.codecs.rans.grid import LANE, STREAM, Grid
from thinwire.codecs.rans.tables import Bytes
from thinwire.types import PayloadError, require

HEAD = 6  # bytes of a head, at most
REPEATED = 32  # where one byte in so many repeats others, Zstandard is tried
AS_IT_IS, PACKED = 0, 1  # how symbols lie in a part; from 2 on, as the bytes of values of so many
__all__ = [
    *("AS_IT_IS", "HEAD", "PACKED", "STREAM", "Asked", "Form", "Frame"),
    *("at_home", "compress", "decompress", "form_of", "opened", "quick", "repeated"),
]


@dataclass(frozen=True)
class Form:
    """What symbols are: ``planes`` (1, 2, 4, 8) runs of equal length and odds of their own, ``bits`` each."""

    planes: int = 1
    bits: int = 8

    def grid(self, n: int) -> Grid:
        """Return where ``n`` symbols of all planes lie."""
        return Grid(n // self.planes, self.planes, LANE * (8 // self.bits))


@lru_cache(maxsize=256)  # asked for each message
def form_of(planes: int, bits: int) -> Form:
    """Return the form of ``planes`` planes of symbols of ``bits`` each."""
    return Form(planes, bits)


@lru_cache(maxsize=256)
def _heads(form: Form, n: int) -> int:
    """Return the bytes in front of the first table of ``n`` symbols."""
    return form.grid(n).heads


class Frame(NamedTuple):
    """The head of a frame: its form, how many symbols of all planes it holds, and its own bytes."""

    form: Form
    n: int
    nbytes: int


class Asked(NamedTuple):
    """A part (uint8 [n], n >= 1) to be a frame behind a tag, of fewer than ``room`` bytes in all."""

    data: Tensor
    form: Form
    room: int
    tag: int
    how: int = AS_IT_IS


def quick(part: Tensor) -> bool:
    """Return whether kernels or compiled passes code a part where it is, or on the CPU."""
    return rans_calls.there() or triton_calls.there(part)


def compress(asked: Sequence[Asked]) -> list[Tensor | None]:
    """Return each as uint8, or None where it takes more room: the same bytes on every device.

    Lengths of those on a card are waited for, once for all.

    >>> noise = (torch.arange(9999) ** 2 % 9 % 4).to(torch.uint8)
    >>> (frame,) = compress([Asked(noise, Form(bits=2), 9999, 0)])
    >>> bool((decompress(frame[1:], opened(frame[1:])) == noise).all())
    True
    """
    begun = [_begun(*one) for one in asked]
    lengths = [one[1] for one in begun if isinstance(one, tuple)]
    read = iter(staging.to_host(lengths).tensors() if lengths else [])
    found = list[Tensor | None]()
    for one, (_, _, room, _, _) in zip(begun, asked, strict=True):
        length = int(next(read)) if isinstance(one, tuple) else 0
        found.append((one[0][:length] if length < room else None) if isinstance(one, tuple) else one)
    return found


def _begun(data: Tensor, form: Form, room: int, tag: int, how: int) -> tuple[Tensor, Tensor] | Tensor | None:
    """Return a frame, or bytes that begin with it and its length, both on the card."""
    n = data.numel() * (8 // form.bits if how == PACKED else 1)
    if data.is_cpu and rans_calls.there() and (how == AS_IT_IS or n <= STREAM):
        return rans_calls.framed(data.contiguous(), n, how, form.planes, form.bits, tag, room)
    grid, head = form.grid(n), bytes((tag,)) + _head(form, n)
    if len(head) + grid.heads >= room:
        return None
    symbols = _apart(data, how, form.bits)
    if form.bits == 8 and triton_calls.there(symbols):
        from thinwire.codecs.rans import on_card

        return on_card.encode(symbols.contiguous(), grid, head, room)
    found = _whole(at_home(symbols).numpy(), grid, head, room)
    return None if found is None else torch.from_numpy(found).to(symbols.device)


def _apart(data: Tensor, how: int, bits: int) -> Tensor:
    """Return the symbols of a part, uint8 [n], as they are coded."""
    if how == PACKED:  # few, and so on the CPU
        shifts = np.arange(0, 8 - bits + 1, bits, dtype=np.uint8)[:, None]
        return torch.from_numpy((data.numpy() >> shifts & ((1 << bits) - 1)).reshape(-1))
    return data if how == AS_IT_IS else _turned(data.view(-1, how))


def _joined(symbols: Tensor, how: int, bits: int) -> Tensor:
    """Return the part whose symbols these are."""
    if how == PACKED:
        shifts = np.arange(0, 8 - bits + 1, bits, dtype=np.uint8)[:, None]
        each = symbols.numpy().reshape(len(shifts), -1)
        return torch.from_numpy(np.bitwise_or.reduce(each << shifts, axis=0))
    return symbols if how == AS_IT_IS else _turned(symbols.view(how, -1))


def _turned(x: Tensor) -> Tensor:
    """Return the bytes of ``x`` column by column: by numpy in a quarter of torch's time [measured]."""
    return torch.from_numpy(x.numpy().T.flatten()) if x.is_cpu else x.T.reshape(-1)


def repeated(data: Tensor, n: int) -> bool:
    """Return whether so much of the first ``n`` bytes of a part repeats that Zstandard may save some."""
    if not rans_calls.there() or not data.is_cpu:
        return True
    return rans_calls.repeated(data.contiguous(), n) * REPEATED >= n


def at_home(x: Tensor) -> Tensor:
    """Return a tensor in one piece of the CPU's memory."""
    return x.contiguous() if x.is_cpu else staging.to_host([x]).tensors()[0].contiguous()


def _whole(data: Bytes, grid: Grid, head: bytes, room: int) -> Bytes | None:
    out = np.empty(room - 1, np.uint8)
    out[: len(head)] = np.frombuffer(head, np.uint8)
    body = out[len(head) :]
    if rans_calls.there():
        n = rans_calls.encode(data, grid, body)
        return None if n is None else out[: len(head) + n].copy()
    found = np.frombuffer(lanes.encode(data, grid), np.uint8)
    if len(found) > len(body):
        return None
    body[: len(found)] = found
    return out[: len(head) + len(found)].copy()


def opened(frame: Tensor | memoryview) -> Frame:
    """Return the head of a frame on the CPU; ``PayloadError`` where it is none."""
    data = frame[:HEAD] if isinstance(frame, memoryview) else staging.memory(frame[:HEAD])
    n = end = 0
    for i, byte in enumerate(data):
        n |= (byte & 127) << 7 * (i - 1) if i else 0
        if i and byte < 128:
            end = i + 1
            break
    require(end > 0, PayloadError, "a frame of symbols without its head")
    planes, bits = 1 << (data[0] & 3), data[0] >> 4
    plain = bits == 8 or (bits in range(1, 5) and planes == 1 and n <= STREAM)
    fits = plain and not data[0] & 12 and n > 0 and n % planes == 0
    require(fits, PayloadError, f"a frame of {n} symbols in the unknown form {data[0]}")
    return Frame(form_of(planes, bits), n, end)


def decompress(frame: Tensor, about: Frame, how: int = AS_IT_IS, start: int = 0) -> Tensor:
    """Return the part, uint8, of a frame from ``start`` on and its head, which say how much memory it takes.

    It is on the card where kernels decoded it, else on the CPU.
    Errors: ``PayloadError``; whatever a frame says, nothing beyond it is read.
    """
    planes, bits, n, start = about.form.planes, about.form.bits, about.n, start + about.nbytes
    if frame.numel() - start < _heads(about.form, n):
        raise PayloadError(f"{frame.numel() - start} bytes cannot hold {n} symbols")
    if frame.is_cpu and rans_calls.there() and (how == AS_IT_IS or n <= STREAM):
        nbytes = n // (8 // bits) if how == PACKED else n
        return rans_calls.unframed(frame.contiguous(), start, n, how, planes, bits, nbytes)
    grid, body = about.form.grid(n), frame[start:]
    if bits == 8 and triton_calls.there(body):
        from thinwire.codecs.rans import on_card

        found = on_card.decode(body.contiguous(), grid)
    else:
        data = at_home(body).numpy()
        found = torch.from_numpy((rans_calls if rans_calls.there() else lanes).decode(data, grid))
    return _joined(found, how, bits)


def _head(form: Form, n: int) -> bytes:
    head = bytearray((form.planes.bit_length() - 1 | form.bits << 4,))
    while n > 127:
        head.append(n & 127 | 128)
        n >>= 7
    return bytes(head) + bytes((n,))
