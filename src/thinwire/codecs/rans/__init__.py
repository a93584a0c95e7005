"""Range-coded symbols: frames that a CPU and a GPU read and write alike, for noise of uneven odds.

A frame is a byte of its form (bits 0 and 1: log2 of the planes; bits 4 to 7: the bits of a symbol), the
number of symbols (seven bits a byte, the lowest first, bit 7: more follow), and a body (see ``grid``).
Symbols of less than 8 bits, of which there are at most ``STREAM``, are codes that ``pack_aligned`` would put
several to a byte: few of them are cheaper with a short table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
__all__ = ["HEAD", "STREAM", "Asked", "Form", "Frame", "at_home", "compress", "decompress", "opened"]


@dataclass(frozen=True)
class Form:
    """What symbols are: ``planes`` (1, 2, 4, 8) runs of equal length and odds of their own, ``bits`` each."""

    planes: int = 1
    bits: int = 8

    def grid(self, n: int) -> Grid:
        """Return where ``n`` symbols of all planes lie."""
        return Grid(n // self.planes, self.planes, LANE * (8 // self.bits))


@dataclass(frozen=True)
class Frame:
    """The head of a frame: its form, how many symbols of all planes it holds, and its own bytes."""

    form: Form
    n: int
    nbytes: int


class Asked(NamedTuple):
    """Symbols (uint8 [n], n >= 1) to be a frame behind ``prefix``, of fewer than ``room`` bytes in all."""

    symbols: Tensor
    form: Form
    room: int
    prefix: bytes = b""


def compress(asked: Sequence[Asked]) -> list[Tensor | None]:
    """Return each as uint8, or None where it takes more room: the same bytes on every device.

    Lengths of those on a card are waited for, once for all.

    >>> noise = (torch.arange(9999) ** 2 % 9 % 4).to(torch.uint8)
    >>> (frame,) = compress([Asked(noise, Form(bits=2), 9999)])
    >>> bool((decompress(frame, opened(frame)) == noise).all())
    True
    """
    begun = [_begun(*one) for one in asked]
    lengths = [one[1] for one in begun if isinstance(one, tuple)]
    read = iter(staging.to_host(lengths).tensors() if lengths else [])
    found = list[Tensor | None]()
    for one, (_, _, room, _) in zip(begun, asked, strict=True):
        length = int(next(read)) if isinstance(one, tuple) else 0
        found.append((one[0][:length] if length < room else None) if isinstance(one, tuple) else one)
    return found


def _begun(symbols: Tensor, form: Form, room: int, prefix: bytes) -> tuple[Tensor, Tensor] | Tensor | None:
    """Return a frame, or bytes that begin with it and its length, both on the card."""
    grid, head = form.grid(symbols.numel()), prefix + _head(form, symbols.numel())
    if len(head) + grid.heads >= room:
        return None
    if form.bits == 8 and triton_calls.there(symbols):
        from thinwire.codecs.rans import on_card

        return on_card.encode(symbols.contiguous(), grid, head, room)
    found = _whole(at_home(symbols).numpy(), grid, head, room)
    return None if found is None else torch.from_numpy(found).to(symbols.device)


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


def opened(frame: Tensor) -> Frame:
    """Return the head of a frame on the CPU; ``PayloadError`` where it is none."""
    data = bytes(staging.memory(frame[:HEAD]))
    end = next((i for i, byte in enumerate(data) if i and byte < 128), None)
    require(end is not None, PayloadError, "a frame of symbols without its head")
    form = Form(1 << (data[0] & 3), data[0] >> 4)
    n = sum((byte & 127) << 7 * i for i, byte in enumerate(data[1 : 1 + (end or 0)]))
    plain = form.bits == 8 or (form.bits in range(1, 5) and form.planes == 1 and n <= STREAM)
    fits = plain and not data[0] & 12 and n > 0 and n % form.planes == 0
    require(fits, PayloadError, f"a frame of {n} symbols in the unknown form {data[0]}")
    return Frame(form, n, 1 + (end or 0))


def decompress(frame: Tensor, about: Frame) -> Tensor:
    """Return the symbols, uint8 [n], of a frame and its head, which say how much memory they take.

    They are on the card where kernels decoded them, else on the CPU.
    Errors: ``PayloadError``; whatever a frame says, nothing beyond it is read.
    """
    grid, body = about.form.grid(about.n), frame[about.nbytes :]
    few = f"{body.numel()} bytes cannot hold {about.n} symbols"
    require(body.numel() >= grid.heads, PayloadError, few)
    if about.form.bits == 8 and triton_calls.there(body):
        from thinwire.codecs.rans import on_card

        return on_card.decode(body.contiguous(), grid)
    data = at_home(body).numpy()
    found = (rans_calls if rans_calls.there() else lanes).decode(data, grid)
    return torch.from_numpy(found)


def _head(form: Form, n: int) -> bytes:
    head = bytearray((form.planes.bit_length() - 1 | form.bits << 4,))
    while n > 127:
        head.append(n & 127 | 128)
        n >>= 7
    return bytes(head) + bytes((n,))
