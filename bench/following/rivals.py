"""What others send when weights change, for ``costs``: all of it, exclusive ors, sorted sparse patches.

- ``full``: every bf16 value, zstd.
- ``xor``: the exclusive or with the version before, zstd: as SkyRL's deltas against the last checkpoint.
- ``pulse``: PULSE (Miahi and Belilovsky, arXiv 2602.03839). Quoted: it "transmits only the indices and
  values of modified parameters", found by comparing bf16 bits; 14 GB become about 108 MB for 7B parameters;
  what is said of its pipeline is delta-coded indices, "type downscaling (uint8/16 for small deltas)", zstd.
  Our reading of that, favourable to it: indices into the flattened tensor, sorted; first differences in the
  narrowest of uint8, uint16 and uint32 that holds those of the tensor; indices and values of all tensors in
  one zstd stream each. ``pulse-int32`` leaves out the downscaling, as the authors' script that compares
  compressors does. The SHA-256 that they check each version with is in no time here.
- ``sparse``: for each tensor the indices of what changed, int32, and the new bf16 values, not compressed, as
  in the sparse patches of vLLM's weight transfer (issue 39451 wants, quoted, "only indices + values", int32
  and of the parameter's dtype) and in the sparse safetensors files of TRL's delta weight sync. Names and
  headers are left out, in their favour.

Rivals have no state: the words before are given to both ends, and no time goes into keeping them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
import zstandard

from bench.following.recording import words_of
from thinwire.state.layout import Layout

Tensors = dict[str, torch.Tensor]
WIDTHS = (np.uint8, np.uint16, np.uint32)


class Rival(ABC):
    """One way to send a version. ``now`` is scratch space [n] that both ends of all rivals share."""

    kind = ""

    def __init__(self, layout: Layout, level: int, now: np.ndarray) -> None:
        self.layout, self.now = layout, now
        self.name = f"{self.kind} zstd-{level}" if level else self.kind
        self._coder = zstandard.ZstdCompressor(level=level)
        self._decoder = zstandard.ZstdDecompressor()

    def _unpacked(self, data: bytes, dtype: type) -> np.ndarray:
        return np.frombuffer(self._decoder.decompress(data), dtype)

    def encode(self, tensors: Tensors, before: np.ndarray) -> list[bytes]:
        """Return what travels, for fp32 tensors and the words [n] that the other end holds."""
        words_of(tensors, self.now)
        return self.pack(self.now, before)

    @abstractmethod
    def pack(self, words: np.ndarray, before: np.ndarray) -> list[bytes]:
        """Return what travels, for words [n], which stay as they are unless they are ``now``."""

    @abstractmethod
    def decode(self, parts: list[bytes], held: np.ndarray) -> None:
        """Bring the words ``held`` [n] forward."""


class Full(Rival):
    """Every value."""

    kind = "full"

    def pack(self, words: np.ndarray, before: np.ndarray) -> list[bytes]:
        return [self._coder.compress(words.data)]

    def decode(self, parts: list[bytes], held: np.ndarray) -> None:
        np.copyto(held, self._unpacked(parts[0], np.int16))


class Xor(Rival):
    """The bits that flip."""

    kind = "xor"

    def pack(self, words: np.ndarray, before: np.ndarray) -> list[bytes]:
        np.bitwise_xor(words, before, out=self.now)
        return [self._coder.compress(self.now.data)]

    def decode(self, parts: list[bytes], held: np.ndarray) -> None:
        np.bitwise_xor(held, self._unpacked(parts[0], np.int16), out=held)


class Pulse(Rival):
    """Sorted index differences and values."""

    kind = "pulse"
    widths: tuple[type, ...] = WIDTHS

    def pack(self, words: np.ndarray, before: np.ndarray) -> list[bytes]:
        counts, widths, gaps, values, start = [], [], [], [], 0
        for slot in self.layout.slots:
            part = words[start : start + slot.numel]
            at = np.flatnonzero(part != before[start : start + slot.numel])
            apart = np.diff(at, prepend=0)
            most = apart.max(initial=0)
            width = next(i for i, w in enumerate(self.widths) if most <= np.iinfo(w).max)
            counts.append(at.size)
            widths.append(width)
            gaps.append(apart.astype(self.widths[width]).tobytes())
            values.append(part[at])
            start += slot.numel
        head = np.array(counts, np.uint32).tobytes() + np.array(widths, np.uint8).tobytes()
        streams = (b"".join(gaps), np.concatenate(values).data)
        return [head, *(self._coder.compress(s) for s in streams)]

    def decode(self, parts: list[bytes], held: np.ndarray) -> None:
        n = len(self.layout.slots)
        counts, widths = np.frombuffer(parts[0], np.uint32, n), np.frombuffer(parts[0][4 * n :], np.uint8)
        gaps, values = self._decoder.decompress(parts[1]), self._unpacked(parts[2], np.int16)
        start = at = taken = 0
        for slot, count, width in zip(self.layout.slots, counts.tolist(), widths, strict=True):
            dtype = np.dtype(self.widths[width])
            where = np.cumsum(np.frombuffer(gaps, dtype, count, at), dtype=np.int64)
            held[start : start + slot.numel][where] = values[taken : taken + count]
            at += count * dtype.itemsize
            taken += count
            start += slot.numel


class PulseInt32(Pulse):
    """The same without downscaling."""

    kind = "pulse-int32"
    widths = (np.int32,)


class Sparse(Rival):
    """Indices and values."""

    kind = "sparse"

    def pack(self, words: np.ndarray, before: np.ndarray) -> list[bytes]:
        counts, indices, values, start = [], [], [], 0
        for slot in self.layout.slots:
            part = words[start : start + slot.numel]
            at = np.flatnonzero(part != before[start : start + slot.numel])
            counts.append(at.size)
            indices.append(at.astype(np.int32).tobytes())
            values.append(part[at].tobytes())
            start += slot.numel
        return [np.array(counts, np.uint32).tobytes(), *indices, *values]

    def decode(self, parts: list[bytes], held: np.ndarray) -> None:
        n, start = len(self.layout.slots), 0
        for slot, at, values in zip(self.layout.slots, parts[1 : n + 1], parts[n + 1 :], strict=True):
            held[start : start + slot.numel][np.frombuffer(at, np.int32)] = np.frombuffer(values, np.int16)
            start += slot.numel


def rivals(layout: Layout) -> list[Rival]:
    """Return all rivals, one scratch space between them."""
    now = np.empty(layout.numel, np.int16)
    kinds = ((Full, 1), (Xor, 1), (Xor, 3), (PulseInt32, 1), (Pulse, 1), (Pulse, 3), (Sparse, 0))
    return [kind(layout, level, now) for kind, level in kinds]
