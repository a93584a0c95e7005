"""Range coding by numpy, where there is no C compiler: one step of all lanes of all streams at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thinwire.codecs.rans.grid import CONSTANT, LANES, LOW, Grid, Ints, precision
from thinwire.codecs.rans.tables import Bytes, constant, normalised, packed, unpacked
from thinwire.types import PayloadError, require

Words = npt.NDArray[np.uint16]
_LANES = np.arange(LANES)
FEW = 64  # lanes in all up to which Python's own numbers take less time than numpy's steps [measured]


def encode(symbols: Bytes, grid: Grid) -> bytes:
    """Return the body of symbols [planes * n] (see ``grid``)."""
    begins, lengths = grid.cut(grid.segment)
    counts = [np.bincount(symbols[b : b + k], minlength=256) for b, k in zip(begins, lengths, strict=True)]
    mixed = [int(np.count_nonzero(c)) > 1 for c in counts]
    bits = [precision(int(k)) for k in lengths]
    freq = [normalised(c, p) if m else c for c, p, m in zip(counts, bits, mixed, strict=True)]
    tables = [packed(f) if m else constant(int(f.argmax())) for f, m in zip(freq, mixed, strict=True)]
    owner = grid.segment_of()
    words: list[Words] = [np.zeros(0, np.uint16)] * grid.streams
    at = np.flatnonzero(np.array(mixed)[owner])
    for i, own in zip(at, _coded(symbols, grid, at, np.stack(freq), np.array(bits)), strict=True):
        words[i] = own
    heads = np.array([*map(len, tables), *map(len, words)], "<u2").tobytes()
    streams = [words[a:b] for a, b in _ranges(owner, len(tables))]
    return heads + b"".join(
        t + b"".join(w.astype("<u2").tobytes() for w in own) for t, own in zip(tables, streams, strict=True)
    )


def _ranges(owner: Ints, n: int) -> list[tuple[int, int]]:
    ends = np.searchsorted(owner, np.arange(n + 1))
    return list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))


def _coded(symbols: Bytes, grid: Grid, streams: Ints, freq: Ints, bits: Ints) -> list[Words]:
    """Return the words of some streams; ``freq`` [segments, 256]."""
    begin, length = (x[streams] for x in grid.cut(grid.stream))
    if not len(streams):
        return []
    owner = grid.segment_of()[streams]
    start, shift = freq.cumsum(1) - freq, bits[owner, None]
    lanes = -(-length // grid.lane)
    if lanes.sum() <= FEW:
        cut = zip(begin.tolist(), length.tolist(), lanes.tolist(), owner.tolist(), strict=True)
        return [
            _coded_alone(
                symbols[b : b + n].tobytes(), k, freq[own].tolist(), start[own].tolist(), int(bits[own])
            )
            for b, n, k, own in cut
        ]
    words = np.zeros((len(streams), int(length.max()) + 2 * LANES), np.uint16)
    state, at = np.full((len(streams), LANES), LOW), np.full(len(streams), words.shape[1])
    rows = np.broadcast_to(np.arange(len(streams))[:, None], state.shape)
    for step in range(grid.lane - 1, -1, -1):
        i = step * lanes[:, None] + _LANES
        there = (lanes[:, None] > _LANES) & (i < length[:, None])
        if not there.any():
            continue
        symbol = symbols[begin[:, None] + np.where(there, i, 0)]
        f, s = freq[owner[:, None], symbol], start[owner[:, None], symbol]
        full = there & (state >= f << (31 - shift))
        place = at[:, None] - np.cumsum(full[:, ::-1], 1)[:, ::-1]
        words[rows[full], place[full]] = state[full] & 0xFFFF
        at -= full.sum(1)
        x = np.where(full, state >> 16, state)
        state = np.where(there, (x // f << shift) + s + x % f, state)
    return [_whole(*one) for one in zip(words, at.tolist(), state, lanes.tolist(), strict=True)]


def _coded_alone(symbols: bytes, lanes: int, freq: list[int], start: list[int], bits: int) -> Words:
    """Return the words of one stream."""
    states, words = [LOW] * lanes, list[int]()
    for i in range(len(symbols) - 1, -1, -1):
        f, x = freq[symbols[i]], states[i % lanes]
        if x >= f << (31 - bits):
            words.append(x & 0xFFFF)
            x >>= 16
        states[i % lanes] = (x // f << bits) + start[symbols[i]] + x % f
    return _whole(np.array(words[::-1], np.uint16), 0, np.array(states), lanes)


def _whole(words: Words, at: int, state: Ints, lanes: int) -> Words:
    """Return the states of lanes and the words behind them."""
    return np.concatenate([state[:lanes].astype("<u4").view("<u2"), words[at:]])


def decode(body: Bytes, grid: Grid) -> Bytes:
    """Return the symbols [planes * n] of a body; ``PayloadError`` where it is none."""
    heads = body[: grid.heads].view("<u2").astype(np.int64)
    sizes, words = heads[: grid.segments], heads[grid.segments :]
    owner = grid.segment_of()
    ends = np.cumsum(sizes + 2 * np.bincount(owner, words, minlength=len(sizes)).astype(np.int64))
    require(grid.heads + int(ends[-1]) == len(body), PayloadError, "streams of another length than they say")
    at = grid.heads + np.concatenate([[0], ends[:-1]])
    out = np.empty(grid.n * grid.planes, np.uint8)
    tables = [body[a : a + k].tobytes() for a, k in zip(at, sizes, strict=True)]
    mixed = np.array([_is_mixed(t) for t in tables])
    for table, begin, length in zip(tables, *grid.cut(grid.segment), strict=True):
        out[begin : begin + length] = table[1] if table[0] == CONSTANT else 0
    bits = np.array([precision(int(k)) for k in grid.cut(grid.segment)[1]])
    freq = [
        unpacked(t, int(p)) if m else np.zeros(256, np.int64)
        for t, p, m in zip(tables, bits, mixed, strict=True)
    ]
    before = np.cumsum(words) - words  # of the words of this segment: those of others cancel
    first = np.searchsorted(owner, owner)
    places = (at + sizes)[owner] + 2 * (before - before[first])
    require(not words[~mixed[owner]].any(), PayloadError, "words of a segment of one symbol")
    _decoded(body, grid, np.flatnonzero(mixed[owner]), (np.stack(freq), bits, places, words), out)
    return out


def _is_mixed(table: bytes) -> bool:
    require(len(table) >= 2, PayloadError, "a table of frequencies that no encoder writes")
    require(table[0] != CONSTANT or len(table) == 2, PayloadError, "a table of one symbol and more")
    return table[0] != CONSTANT


def _decoded(
    body: Bytes, grid: Grid, streams: Ints, known: tuple[Ints, Ints, Ints, Ints], out: Bytes
) -> None:
    """Decode some streams to their places in ``out``; a word that is not there shows at the end."""
    if not len(streams):
        return
    freq, bits, places, words = known
    begin, length = (x[streams] for x in grid.cut(grid.stream))
    owner, at = grid.segment_of()[streams], places[streams]
    end, lanes = at + 2 * words[streams], -(-length // grid.lane)
    require(bool((at + 4 * lanes <= end).all()), PayloadError, "a stream without the states of its lanes")
    symbols, start, shift = _slots(freq), freq.cumsum(1) - freq, bits[owner, None]
    if lanes.sum() <= FEW:
        for k, own in enumerate(owner.tolist()):
            there = body[int(at[k]) : int(end[k])].view("<u2").tolist()
            about = symbols[own].tobytes(), freq[own].tolist(), start[own].tolist(), int(bits[own])
            found = _decoded_alone(there, int(lanes[k]), int(length[k]), *about)
            out[int(begin[k]) : int(begin[k] + length[k])] = np.frombuffer(found, np.uint8)
        return
    used = lanes[:, None] > _LANES
    states = at[:, None] + np.where(used, 4 * _LANES, 0)
    state = np.where(used, _word(body, states) | _word(body, states + 2) << 16, LOW)
    at = at + 4 * lanes
    for step in range(grid.lane):
        i = step * lanes[:, None] + _LANES
        there = used & (i < length[:, None])
        if not there.any():
            break
        slot = state & ((1 << shift) - 1)
        symbol = symbols[owner[:, None], slot]
        out[(begin[:, None] + i)[there]] = symbol[there]
        x = freq[owner[:, None], symbol] * (state >> shift) + slot - start[owner[:, None], symbol]
        empty = there & (x < LOW)
        place = at[:, None] + 2 * (np.cumsum(empty, 1) - empty)
        state = np.where(empty, x << 16 | _word(body, place), np.where(there, x, state))
        at = at + 2 * empty.sum(1)
    done = bool((at == end).all() and (state == LOW).all())
    require(done, PayloadError, "a stream that no encoder writes")


def _decoded_alone(
    words: list[int], lanes: int, length: int, symbols: bytes, freq: list[int], start: list[int], bits: int
) -> bytes:
    """Return the symbols of one stream."""
    states = [words[2 * k] | words[2 * k + 1] << 16 for k in range(lanes)]
    rest, found, mask = iter(words[2 * lanes :]), bytearray(length), (1 << bits) - 1
    for i in range(length):
        x = states[i % lanes]
        slot = x & mask
        found[i] = symbol = symbols[slot]
        x = freq[symbol] * (x >> bits) + slot - start[symbol]
        if x < LOW:
            if (word := next(rest, None)) is None:
                raise PayloadError("a stream that no encoder writes")
            x = x << 16 | word
        states[i % lanes] = x
    done = next(rest, None) is None and all(x == LOW for x in states)
    require(done, PayloadError, "a stream that no encoder writes")
    return bytes(found)


def _word(body: Bytes, at: Ints) -> Ints:
    at = np.minimum(at, len(body) - 2)
    return body[at].astype(np.int64) | body[at + 1].astype(np.int64) << 8


def _slots(freq: Ints) -> Bytes:
    """Return which symbol each of 4096 slots stands for, [segments, 4096]; zeros beyond the last."""
    found = np.zeros((len(freq), 4096), np.uint8)
    for row, own in zip(found, freq, strict=True):
        row[: own.sum()] = np.repeat(np.arange(256, dtype=np.uint8), own)
    return found
