"""Range coding by kernels in Triton, where the symbols are."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.kernels.triton_calls import on
from thinwire.codecs.rans.grid import LANES, STREAMS, Grid
from thinwire.types import PayloadError
from thinwire.verdicts import refuse

TABLE = 96  # words of a table: 2 bytes, and at most 255 codes of 9.2 bits each on the average
ROWS = 1  # streams of a program
CHUNK, BLOCK = 1 << 14, 1 << 10


def encode(symbols: Tensor, grid: Grid, head: bytes, room: int) -> Tensor | None:
    """Return ``head`` and the body of symbols, uint8, of fewer than ``room`` bytes; else None."""
    with on(symbols.device):
        out, total = _encoded(symbols, grid, head, room)
    length = int(total)
    return out[:length] if length < room else None


def _encoded(symbols: Tensor, grid: Grid, head: bytes, room: int) -> tuple[Tensor, Tensor]:
    from thinwire.codecs.kernels.fused import rans_writing as writing

    segments, streams = grid.segments, grid.streams
    per, each = segments // grid.planes, streams // grid.planes

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=symbols.device)

    zeros = torch.zeros(segments * (256 + TABLE), dtype=torch.int32, device=symbols.device)
    counts, tables = zeros[: segments * 256], zeros[segments * 256 :]
    chunks = -(-min(grid.n, grid.segment) // CHUNK)
    writing.count[segments, chunks](symbols, counts, grid.n, per, grid.segment, CHUNK, BLOCK)
    entries, sizes = empty(segments, 256), empty(segments)
    writing.tabulate[(segments,)](counts, entries, tables, sizes, grid.n, per, grid.segment, TABLE)
    words = empty(streams, grid.stream + 2 * LANES, dtype=torch.int16)
    used = empty(streams)
    writing.encode[segments, STREAMS // ROWS](
        *(symbols, entries, sizes, words, used, grid.n, per, each, grid.lane, ROWS), num_warps=ROWS
    )
    offsets, total = empty(segments, dtype=torch.int64), empty(1, dtype=torch.int64)
    base = len(head) + grid.heads
    writing.place[(1,)](sizes, used, offsets, total, segments, per, each, base, BLOCK)
    out = empty(room, dtype=torch.uint8)
    writing.gather[segments, STREAMS + 1](
        *(tables, sizes, words, used, offsets, out, grid.n, per, each),
        *(int.from_bytes(head, "little"), len(head), room, grid.lane, TABLE, BLOCK),
    )
    return out, total


def decode(body: Tensor, grid: Grid) -> Tensor:
    """Return the symbols, uint8 [planes * n], of a body; ``PayloadError`` where it is none."""
    with on(body.device):
        out, wrong = _decoded(body, grid)
    text = f"{body.numel()} bytes that no encoder of {out.numel()} symbols writes"
    refuse(wrong, lambda: PayloadError(text))
    return out


def _decoded(body: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    from thinwire.codecs.kernels.fused import rans_reading as reading

    segments, streams, length = grid.segments, grid.streams, body.numel()
    per, each = segments // grid.planes, streams // grid.planes

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=body.device)

    wrong = torch.zeros(1, dtype=torch.int32, device=body.device)
    offsets, starts, slots = empty(segments, dtype=torch.int64), empty(segments, 257), empty(segments, 4096)
    reading.locate[(1,)](body, offsets, wrong, length, segments, per, each, grid.heads, BLOCK)
    reading.untabulate[(segments,)](
        *(body, offsets, starts, wrong, length, grid.n, per, grid.segment), num_warps=1
    )
    reading.spread[segments, 4](starts, slots)
    out = empty(grid.n * grid.planes, dtype=torch.uint8)
    reading.decode[segments, STREAMS // ROWS](
        *(body, offsets, starts, slots, out, wrong, length, grid.n, per, each, segments, grid.lane, ROWS),
        *(BLOCK,),
        num_warps=ROWS,
    )
    return out, wrong
