"""What hosts of rollouts send today when weights change, for ``sync_hosts``: each as its own sources have it.

- ``vllm sparse``: read in vLLM 0.33's wheel (``sparse_nccl_engine``): for each tensor that changed int32
  indices into it and values of its own dtype, not compressed, in messages of their own; names, dtypes, shapes
  and counts go before them by a call, here as compact JSON [derived: a call's own framing is left out].
- ``verl delta``: read in verl 0.9.1's wheel (``delta_sharded``): positions of all tensors as one int32 blob,
  values as another, an entry of eight fields a tensor, here rows of JSON, and a checksum, the exclusive or
  of both blobs by 64 bits. One flush: its buckets are larger than what changes here [derived].
- ``xor``: the bits that flip, zstd, a stretch at a time so that no buffer is as long as the state. As NVIDIA
  modelexpress is described ("XOR and zstd") [second-hand].
- ``pulse``: as ``rivals`` reads the paper.

All is in their favour: values are applied where they stand, without the dense tensors of NaN that vLLM loads
a sparse patch by; nothing brings a sender's copy of the words before forward; no time goes into a protocol.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.following.rivals import Pulse, Rival
from thinwire.state.layout import Layout, Slot

STRETCH = 1 << 20  # words
POSITION = np.dtype(np.int32)


def changed(layout: Layout, words: np.ndarray, before: np.ndarray) -> Iterator[tuple[Slot, int, np.ndarray]]:
    """Yield each tensor with changes, where it starts, and their positions in it [k]."""
    start = 0
    for slot in layout.slots:
        part = slice(start, start + slot.numel)
        at = np.flatnonzero(words[part] != before[part])
        if at.size:
            yield slot, start, at
        start += slot.numel


def starts(layout: Layout) -> dict[str, int]:
    """Return where each tensor starts."""
    found, start = {}, 0
    for slot in layout.slots:
        found[slot.name] = start
        start += slot.numel
    return found


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class VllmSparse(Rival):
    """Indices and values, a message each a tensor."""

    kind = "vllm sparse"

    def pack(self, words: np.ndarray, before: np.ndarray) -> list[bytes]:
        head: list[list[Any]] = [[], [], [], []]  # names, dtypes, shapes, counts
        parts = []
        for slot, start, at in changed(self.layout, words, before):
            for column, value in zip(head, (slot.name, slot.kind, slot.shape, at.size), strict=True):
                column.append(value)
            parts += [at.astype(POSITION).tobytes(), words[start + at].tobytes()]
        return [_json(head), *parts]

    def decode(self, parts: list[bytes], held: np.ndarray) -> None:
        names, _, _, counts = json.loads(parts[0])
        first = starts(self.layout)
        for i, (name, count) in enumerate(zip(names, counts, strict=True)):
            at = np.frombuffer(parts[1 + 2 * i], POSITION, count)
            held[first[name] :][at] = np.frombuffer(parts[2 + 2 * i], np.int16, count)


class VerlDelta(Rival):
    """All positions, all values, a manifest and a checksum."""

    kind = "verl delta"

    def pack(self, words: np.ndarray, before: np.ndarray) -> list[bytes]:
        rows, places, values, done = [], [np.empty(0, POSITION)], [np.empty(0, np.int16)], 0
        for slot, start, at in changed(self.layout, words, before):
            end = done + at.size
            rows.append([slot.name, slot.kind, slot.shape, 4 * done, 4 * end, 4, done, end])
            places.append(at.astype(POSITION))
            values.append(words[start + at])
            done = end
        blobs = [np.concatenate(places).tobytes(), np.concatenate(values).tobytes()]
        return [_json([rows, _sum(blobs)]), *blobs]

    def decode(self, parts: list[bytes], held: np.ndarray) -> None:
        rows, told = json.loads(parts[0])
        if _sum(parts[1:]) != told:
            raise SystemExit(f"{self.name}: other bytes came than were sent")
        first, values = starts(self.layout), np.frombuffer(parts[2], np.int16)
        for name, _, _, begin, end, _, low, high in rows:
            at = np.frombuffer(parts[1], POSITION, (end - begin) // 4, begin)
            held[first[name] :][at] = values[low:high]


def _sum(blobs: list[bytes]) -> int:
    """Return the exclusive or of both blobs by 64 bits, the second one moved by a bit."""
    found = [int(np.bitwise_xor.reduce(np.frombuffer(b, np.uint64, len(b) // 8), initial=0)) for b in blobs]
    return found[0] ^ (found[1] << 1)


class StretchedXor(Rival):
    """The bits that flip, a stretch at a time."""

    kind = "xor"

    def pack(self, words: np.ndarray, before: np.ndarray) -> list[bytes]:
        coder, parts = self._coder.compressobj(size=words.nbytes), []
        for start in range(0, words.size, STRETCH):
            part = slice(start, start + STRETCH)
            parts.append(coder.compress((words[part] ^ before[part]).data))
        return [b"".join([*parts, coder.flush()])]

    def decode(self, parts: list[bytes], held: np.ndarray) -> None:
        source, flips = self._decoder.stream_reader(parts[0]), bytearray(2 * STRETCH)
        for start in range(0, held.size, STRETCH):
            part = held[start : start + STRETCH]
            room = memoryview(flips)[: part.nbytes]
            while len(room):
                room = room[source.readinto(room) :]
            part ^= np.frombuffer(flips, np.int16, part.size)


WAYS: tuple[tuple[type[Rival], int], ...] = (
    (VllmSparse, 0), (VerlDelta, 0), (StretchedXor, 1), (StretchedXor, 3), (Pulse, 1), (Pulse, 3),
)  # fmt: skip


def host_formats(layout: Layout) -> dict[str, Rival]:
    """Return what the others send, by name."""
    nothing = np.empty(0, np.int16)
    made = [kind(layout, level, nothing) for kind, level in WAYS]
    return {way.name: way for way in made}
