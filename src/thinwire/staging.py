"""Tensors between a device and the host's memory: put together, one copy, one wait.

Whoever sends calls ``to_host`` with all that one message holds, goes on, and waits once, when the bytes are
wanted. Whoever receives calls ``to_device`` with the bytes. Both copy through pinned memory, and what is long
on a stream of its own, beside the compute that is queued. Pinned memory comes from torch's allocator, which
keeps what is freed, and frees nothing that a copy still reads; so a buffer is free for the next message once
a ``Staged``, and every view of it, is gone. Tensors of the CPU are not copied.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.types import PayloadError, require

KEPT, FIRST = 1 << 13, 16  # bytes of a part that stay known on the host
_KNOWN = "thinwire_first_bytes"  # an attribute of such a tensor: it goes with it
ALIGNMENT = 16  # bytes: a view of any dtype may begin there
SMALL = 1 << 20  # bytes up to which a copy takes less time than to order streams, and so has none of its own
LONG = 1 << 16  # bytes whose copy takes longer than to let other threads have the interpreter
LARGE = 1 << 22  # bytes from which on several threads copy to pinned memory
Data = bytes | bytearray | memoryview
Layout = Sequence[tuple[torch.dtype, int]]  # dtype and number of values of each part
_own = threading.local()  # streams, one a device and thread: copies of two threads do not wait for each other
_CPU = torch.device("cpu")


class Place(NamedTuple):
    """Where a part lies among the bytes of all."""

    start: int
    nbytes: int


def places(sizes: Sequence[int], lead: int = 0, align: int = ALIGNMENT) -> tuple[list[Place], int]:
    """Return the place of each of ``sizes`` [bytes] behind ``lead`` bytes, and where the last one ends.

    >>> places([3, 8])
    ([Place(start=0, nbytes=3), Place(start=16, nbytes=8)], 24)
    """
    found, end = [], lead
    for size in sizes:
        start = -(-end // align) * align
        found.append(Place(start, size))
        end = start + size
    return found, end


class Staged:
    """Parts on their way to the host. What it returns stays valid as long as a view of it is held."""

    def __init__(self, parts: Sequence[Tensor], lead: int, align: int, buffer: Tensor | None) -> None:
        self._lead, self._align, self._buffer = lead, align, buffer
        self._here = parts if buffer is None else ()  # parts of the CPU, as they are; others are let go
        self._forms = [(p.dtype, p.shape, nbytes(p)) for p in parts] if buffer is not None else []
        self._copied: torch.cuda.Event | None = None

    def wait(self) -> memoryview:
        """Wait for the copy, and return all bytes, writable: the lead, then each part at its place.

        Parts of the CPU are put together here; ask for ``views`` or ``tensors`` to have them as they are.
        """
        if self._buffer is not None:
            return _memory(self._whole(self._buffer))
        found, end = places([nbytes(p) for p in self._here], self._lead, self._align)
        whole = torch.zeros(end, dtype=torch.uint8, device=_CPU)
        for (start, n), part in zip(found, self._here, strict=True):
            whole[start : start + n] = bytes_of(part)
        return _memory(whole)

    def views(self) -> list[memoryview]:
        """Wait for the copy, and return the bytes of each part."""
        if self._buffer is None:
            return [memory(part) for part in self._here]
        return [_memory(row) for row in self._rows(self._buffer)]

    def tensors(self, since: int = 0) -> list[Tensor]:
        """Wait for the copy, and return each part from number ``since`` on the CPU, in its shape and dtype.

        Those that were there are themselves; others share their memory with the bytes, if these are aligned.
        """
        if self._buffer is None:
            return [part.detach() for part in self._here[since:]]
        found = []
        for row, (dtype, shape, _) in zip(self._rows(self._buffer)[since:], self._forms[since:], strict=True):
            aligned = row if row.data_ptr() % dtype.itemsize == 0 else row.clone()
            found.append(aligned.view(dtype).reshape(shape))
        return found

    def _rows(self, buffer: Tensor) -> list[Tensor]:
        whole = self._whole(buffer)
        given, _ = places([n for _, _, n in self._forms], self._lead, self._align)
        return [whole[start : start + n] for start, n in given]

    def _whole(self, buffer: Tensor) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return buffer


def nbytes(part: Tensor) -> int:
    """Return the bytes that a part's values take."""
    return part.numel() * part.element_size()


def to_host(parts: Sequence[Tensor], lead: int = 0, align: int = ALIGNMENT) -> Staged:
    """Begin to copy ``parts``, any shapes and dtypes of one device, to the host in one copy; return at once.

    Each part begins at a multiple of ``align`` bytes, 16 at most, behind ``lead`` bytes that are the
    caller's to fill; gaps are zeros. Write to none of the parts before the wait: one alone is read in place.

    >>> to_host([torch.ones(2), torch.tensor(7)]).tensors()
    [tensor([1., 1.]), tensor(7)]
    """
    if not parts or parts[0].is_cpu:
        return Staged(parts, lead, align, None)
    device = parts[0].device
    found, end = places([nbytes(p) for p in parts], lead, align)
    with torch.no_grad():
        joined = _joined([bytes_of(p) for p in parts], found, lead)
        buffer = _room(end, device)
        staged = Staged(parts, lead, align, buffer)
        if device.type == "cuda":
            staged._copied = _copy(joined, buffer[lead:end])
        else:
            buffer[lead:end].copy_(joined)
    return staged


def to_device(
    data: Data, layout: Layout, device: torch.device | str, lead: int = 0, align: int = ALIGNMENT
) -> list[Tensor]:
    """Return the parts that ``data`` holds as ``to_host`` laid them out, flat, on ``device``: in one copy.

    They are writable, aligned, and share one buffer, which is not that of ``data``; on a device they are
    ready for what the current stream does next. Errors: ``PayloadError`` where ``data`` is too short.

    >>> data = to_host([torch.ones(2), torch.tensor(7)]).wait()
    >>> to_device(data, [(torch.float32, 2), (torch.int64, 1)], "cpu")
    [tensor([1., 1.]), tensor([7])]
    """
    sizes = [dtype.itemsize * n for dtype, n in layout]
    given, end = places(sizes, lead, align)
    raw = memoryview(data).cast("B")
    require(len(raw) >= end, PayloadError, f"{len(raw)} bytes for parts of {end}: the rest is missing")
    return put_together([raw[start : start + n] for start, n in given], layout, device)


def put_together(
    pieces: Sequence[memoryview | bytes], layout: Layout, device: torch.device | str
) -> list[Tensor]:
    """Return parts, each given by its bytes, on ``device``; otherwise like ``to_device``."""
    inside, end = places([len(piece) for piece in pieces])
    there = None if device == "cpu" else torch.device(device)
    host = None if there is None or there.type == "cpu" else _room(end, there)
    room = np.empty(end, np.uint8).data if host is None else _memory(host)
    for piece, (start, n) in zip(pieces, inside, strict=True):
        if host is not None and n >= LARGE:
            host[start : start + n].copy_(_view(piece))
        elif n >= LONG:  # other threads go on meanwhile
            np.copyto(np.frombuffer(room, np.uint8)[start : start + n], np.frombuffer(piece, np.uint8))
        else:
            room[start : start + n] = piece
    if host is None or there is None:
        return [
            torch.frombuffer(room, dtype=dtype, count=n, offset=at)
            if n
            else torch.empty(0, dtype=dtype, device=_CPU)
            for (at, _), (dtype, n) in zip(inside, layout, strict=True)
        ]
    whole = _there(host, there)
    found = [whole[a : a + n].view(dtype) for (a, n), (dtype, _) in zip(inside, layout, strict=True)]
    for part, piece in zip(found, pieces, strict=True):
        vars(part)[_KNOWN] = bytes(piece if len(piece) <= KEPT else piece[:FIRST])
    return found


def known(part: Tensor) -> Tensor | None:
    """Return the first bytes of a part that went to a device, uint8 on the CPU, without a wait.

    All of up to ``KEPT`` bytes, ``FIRST`` of more; None unless ``part`` is the very tensor that went there.
    """
    found = vars(part).get(_KNOWN)
    return None if found is None else torch.frombuffer(bytearray(found), dtype=torch.uint8)


def brought(parts: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return flat parts on ``device``: those that are there, and all others in one copy."""
    device = torch.device(device)
    if device.type == "cpu" and all(p.is_cpu for p in parts):
        return list(parts)
    away = [p for p in parts if p.device.type != device.type]
    if not away:
        return [p.to(device) for p in parts]  # perhaps from another card
    if device.type == "cpu":
        moved = iter(to_host(away).tensors())
    else:
        moved = iter(put_together([memory(p) for p in away], [(p.dtype, p.numel()) for p in away], device))
    return [p.to(device) if p.device.type == device.type else next(moved) for p in parts]


def _there(host: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return host.to(device, non_blocking=True)  # of no effect where torch cannot tell when it is done
    if host.numel() <= SMALL:
        return host.to(device, non_blocking=True)
    now, side = torch.cuda.current_stream(device), _stream(device)
    with torch.cuda.stream(side):  # in memory of its own: no copy waits for what the caller computes
        whole = host.to(device, non_blocking=True)
    now.wait_stream(side)
    whole.record_stream(now)
    return whole


class Beside:
    """A stream of its owner's on each CUDA device: what one end codes runs beside what the caller computes.

    Work of one owner keeps its order, whichever threads ask for it. Elsewhere than on CUDA nothing changes.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def on(self, device: torch.device, behind: torch.cuda.Event | None = None) -> Iterator[None]:
        """Queue what this thread asks of ``device`` on the stream, behind an event of ``moment``."""
        if device.type != "cuda":
            yield
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        if behind is not None:
            stream.wait_event(behind)
        with torch.cuda.stream(stream):
            yield

    def wait(self) -> None:
        """Wait until all that was queued is done."""
        for stream in self._streams.values():
            stream.synchronize()


def moment(device: torch.device) -> torch.cuda.Event | None:
    """Return when all is done that this thread queued on ``device``; None where nothing is queued."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def used_here(x: Tensor, behind: torch.cuda.Event | None = None) -> None:
    """Let this thread's stream use ``x``, of another stream, behind an event of ``moment``."""
    if x.device.type == "cuda":
        now = torch.cuda.current_stream(x.device)
        if behind is not None:
            now.wait_event(behind)
        x.record_stream(now)


def bytes_of(part: Tensor) -> Tensor:
    """Return the values of a part as uint8 [n], the same memory where they lie without gaps."""
    flat = part.detach().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single value may have any stride


def _joined(rows: list[Tensor], found: list[Place], lead: int) -> Tensor:
    """Return the rows as one, zeros in the gaps; a row alone as it is."""
    pieces, end, gap = [], lead, None
    for row, (start, n) in zip(rows, found, strict=True):
        if start > end:
            gap = row.new_zeros(ALIGNMENT) if gap is None else gap
            pieces.append(gap[: start - end])
        pieces.append(row)
        end = start + n
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _room(n: int, device: torch.device) -> Tensor:
    """Return memory of the host for ``n`` bytes that a copy to or from ``device`` can use."""
    with torch.inference_mode(False):  # what is made in that mode may not be written to outside it
        return torch.empty(n, dtype=torch.uint8, device=_CPU, pin_memory=device.type == "cuda")


def _view(piece: memoryview | bytes) -> Tensor:
    """Return bytes as a tensor, to be read only: torch warns about those that may not be written to."""
    whole = np.frombuffer(piece, np.uint8)
    return torch.frombuffer((ctypes.c_uint8 * len(whole)).from_address(whole.ctypes.data), dtype=torch.uint8)


def memory(part: Tensor) -> memoryview:
    """Return the bytes of a part of the CPU, flat: its own memory, where it lies without gaps."""
    if part.requires_grad or part.stride() != (1,):
        return _memory(bytes_of(part))
    return _memory(part if part.dtype == torch.uint8 else part.view(torch.uint8))


def _memory(row: Tensor) -> memoryview:
    view: memoryview = row.numpy().data
    return view


def _stream(device: torch.device) -> torch.cuda.Stream:
    streams: dict[torch.device, Any] = _own.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    found: torch.cuda.Stream = streams[device]
    return found


def _copy(source: Tensor, target: Tensor) -> torch.cuda.Event:
    """Begin to copy what is queued to be computed on a card; return when it will be done."""
    now, copied = torch.cuda.current_stream(source.device), torch.cuda.Event()
    if source.numel() <= SMALL:
        target.copy_(source, non_blocking=True)
        copied.record(now)
        return copied
    side = _stream(source.device)
    side.wait_stream(now)
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
        copied.record(side)
    source.record_stream(side)
    return copied
