"""Range coding by kernels in Triton, where the symbols are."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.kernels.triton_calls import launch
from thinwire.codecs.rans.grid import LANES, STREAMS, Grid
from thinwire.types import PayloadError
from thinwire.verdicts import refuse

TABLE = 96  # words of a table: 2 bytes, and at most 255 codes of 9.2 bits each on the average
WRITTEN, READ = 4, 1  # streams of a program: what was fastest on an H200 [measured]
CHUNK, BLOCK = 1 << 14, 1 << 10


def encode(symbols: Tensor, grid: Grid, head: bytes, room: int) -> tuple[Tensor, Tensor]:
    """Return ``head`` and the body of symbols, cut off or uint8 [room], and how long all is, int64 [1]."""
    from thinwire.codecs.kernels.fused import rans_writing as writing

    segments, streams, empty = grid.segments, grid.streams, symbols.new_empty
    numbers = grid.n, segments // grid.planes, streams // grid.planes
    zeros = symbols.new_zeros(segments * (256 + TABLE), dtype=torch.int32)
    counts, tables = zeros[: segments * 256], zeros[segments * 256 :]
    chunks = -(-min(grid.n, grid.segment) // CHUNK)
    launch(writing.count, (segments, chunks), (symbols, counts), numbers[:2], (grid.segment, CHUNK, BLOCK))
    entries, sizes = empty((segments, 256), dtype=torch.int32), empty(segments, dtype=torch.int32)
    made = counts, entries, tables, sizes
    launch(writing.tabulate, (segments,), made, numbers[:2], (grid.segment, TABLE))
    words = empty((streams, grid.stream + 2 * LANES), dtype=torch.int16)
    used = empty(streams, dtype=torch.int32)
    coded = symbols, entries, sizes, words, used
    launch(writing.encode, (segments, STREAMS // WRITTEN), coded, numbers, (grid.lane, WRITTEN), WRITTEN)
    offsets, total = empty(segments, dtype=torch.int64), empty(1, dtype=torch.int64)
    base = len(head) + grid.heads
    launch(writing.place, (1,), (sizes, used, offsets, total), (segments, *numbers[1:], base), (BLOCK,))
    out = empty(room)
    first = int.from_bytes(head[:3], "little"), int.from_bytes(head[3:], "little"), len(head)
    whole = tables, sizes, words, used, offsets, out
    about = grid.lane, TABLE, BLOCK
    launch(writing.gather, (segments, STREAMS + 1), whole, (*numbers, *first, room), about)
    return out, total


def decode(body: Tensor, grid: Grid) -> Tensor:
    """Return the symbols, uint8 [planes * n], of a body; ``PayloadError`` where it is none."""
    from thinwire.codecs.kernels.fused import rans_reading as reading

    segments, streams, length, empty = grid.segments, grid.streams, body.numel(), body.new_empty
    n, per, each = grid.n, segments // grid.planes, streams // grid.planes
    wrong, offsets = body.new_zeros(1, dtype=torch.int32), empty(segments, dtype=torch.int64)
    starts, slots = (empty((segments, k), dtype=torch.int32) for k in (257, 4096))
    heads = length, segments, per, each, grid.heads
    launch(reading.locate, (1,), (body, offsets, wrong), heads, (BLOCK,))
    tables = body, offsets, starts, wrong
    launch(reading.untabulate, (segments,), tables, (length, n, per), (grid.segment,), 1)
    launch(reading.spread, (segments, 4), (starts, slots), (), ())
    out = empty(n * grid.planes)
    coded, numbers = (body, offsets, starts, slots, out, wrong), (length, n, per, each, segments)
    launch(reading.decode, (segments, STREAMS // READ), coded, numbers, (grid.lane, READ, BLOCK), READ)
    refuse(wrong, lambda: PayloadError(f"{length} bytes that no encoder of {n * grid.planes} symbols writes"))
    return out
