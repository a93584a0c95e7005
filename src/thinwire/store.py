"""Stores: where references live between two visits, on the device, in host memory or in a file."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from thinwire.codecs import Cast, Codec, Entropy, Raw, Uniform
from thinwire.types import InputError, Payload, TensorSpec

Parts = tuple[Tensor, ...]


class Store(Protocol):
    """A map from keys to the encoded parts of one reference."""

    def get(self, key: int) -> Parts | None:
        """Return the parts kept under ``key``, or ``None``."""
        ...

    def put(self, key: int, parts: Parts) -> None:
        """Keep a copy of ``parts`` under ``key``."""
        ...

    def drop(self, keys: Iterable[int] | None = None) -> None:
        """Forget some keys, or all."""
        ...

    def keys(self) -> list[int]:
        """Return the keys held, in the order of their first ``put``."""
        ...

    def close(self) -> None:
        """Free what the store holds."""
        ...


class TensorStore:
    """Keep parts as tensors: where they are, or moved to ``device`` (``"cpu"`` for host memory)."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = device
        self._parts: dict[int, Parts] = {}

    def get(self, key: int) -> Parts | None:
        return self._parts.get(key)

    def put(self, key: int, parts: Parts) -> None:
        self._parts[key] = tuple(p.detach().clone().to(self._device or p.device) for p in parts)

    def drop(self, keys: Iterable[int] | None = None) -> None:
        for k in self.keys() if keys is None else keys:
            self._parts.pop(k, None)

    def keys(self) -> list[int]:
        return list(self._parts)

    def close(self) -> None:
        self._parts.clear()


class DiskStore:
    """Keep parts as fixed rows of one memory-mapped file in ``folder``; the file goes with the store.

    Space is reserved before it is mapped, so a full disk is an ``InputError`` and never a bus error.
    Every reference must have the layout of the first.
    """

    GROWTH = 64  # rows added at least when the file is full

    def __init__(self, folder: Path | str | None = None) -> None:
        self._file = tempfile.TemporaryFile(prefix="thinwire-references-", dir=folder)  # noqa: SIM115
        self._map: mmap.mmap | None = None
        self._layout: tuple[tuple[torch.dtype, int], ...] = ()
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._capacity = 0

    @property
    def row_nbytes(self) -> int:
        return sum(dtype.itemsize * n for dtype, n in self._layout)

    def get(self, key: int) -> Parts | None:
        if key not in self._slots:
            return None
        if self._map is None:  # rows of zero bytes need no file
            return tuple(torch.empty(n, dtype=dtype) for dtype, n in self._layout)
        at, parts = self._slots[key] * self.row_nbytes, []
        for dtype, n in self._layout:
            row = bytearray(self._map[at : at + n * dtype.itemsize])
            parts.append(torch.frombuffer(row, dtype=dtype) if row else torch.empty(0, dtype=dtype))
            at += len(row)
        return tuple(parts)

    def put(self, key: int, parts: Parts) -> None:
        layout = tuple((p.dtype, p.numel()) for p in parts)
        if not self._slots and layout != self._layout:
            self._layout, self._capacity = layout, 0  # rows of another size: the file holds another number
        if layout != self._layout:
            raise InputError(
                f"a disk store holds rows of {self._layout}, got {layout}; use one store per boundary"
            )
        if key not in self._slots:
            self._slots[key] = self._free.pop() if self._free else len(self._slots)
            self._reserve(self._slots[key] + 1)
        if self._map is None:
            return
        at = self._slots[key] * self.row_nbytes
        for p in parts:
            raw = p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            self._map[at : at + len(raw)] = raw
            at += len(raw)

    def _reserve(self, rows: int) -> None:
        if rows <= self._capacity or not self.row_nbytes:
            return
        capacity = max(rows, 2 * self._capacity, self.GROWTH)
        try:
            _allocate(self._file.fileno(), capacity * self.row_nbytes)
        except OSError as e:
            raise InputError(
                f"no room for {capacity * self.row_nbytes} bytes of references on disk ({e.strerror}); "
                "free space there or choose another folder"
            ) from e
        if self._map is not None:
            self._map.close()
        self._map = mmap.mmap(self._file.fileno(), capacity * self.row_nbytes)
        self._capacity = capacity

    def drop(self, keys: Iterable[int] | None = None) -> None:
        for k in self.keys() if keys is None else keys:
            if k in self._slots:
                self._free.append(self._slots.pop(k))

    def keys(self) -> list[int]:
        return list(self._slots)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
        self._file.close()
        self._slots.clear()


def _allocate(file: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, nbytes)
    else:  # macOS: writing is the only way to reserve
        os.pwrite(file, bytes(nbytes - os.fstat(file).st_size), os.fstat(file).st_size)


def check_holds(codec: Codec) -> None:
    """Raise ``InputError`` unless both ends *encode* the same bits with ``codec``, on whatever processor.

    Any codec decodes alike everywhere; one that adds up floats or takes logarithms may not encode alike.
    """
    inner = codec.inner if isinstance(codec, Entropy) else codec
    if not isinstance(inner, (Raw, Cast)) and not (isinstance(inner, Uniform) and inner.bits > 1):
        raise InputError(
            f"references cannot be held as {codec!r}; take Raw, Cast or Uniform of 2 bits or more"
        )


class References:
    """The states of one channel end: a store, and the codec that says how they are held (fp32, fp16, int8).

    Both ends hold the *decoded* form of what they keep, so a coarse codec costs accuracy but never agreement.
    """

    def __init__(self, codec: Codec | None = None, store: Store | None = None) -> None:
        self.codec: Codec = codec or Raw()
        self.store: Store = store if store is not None else TensorStore()
        self._specs: dict[int, TensorSpec] = {}

    def load(self, keys: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return the states of ``keys``, stacked, on ``device``. Errors: ``KeyError`` where there is none."""
        return torch.cat([self._one(k, device) for k in keys])

    def _one(self, key: int, device: torch.device | str) -> Tensor:
        parts = self.store.get(key)
        if parts is None:
            raise KeyError(key)
        return self.codec.decode(Payload(self._specs[key], tuple(p.to(device) for p in parts)))

    def save(self, keys: Sequence[int], states: Tensor) -> None:
        """Keep row i of ``states`` under key i."""
        self.put(keys, self.encode(states))

    def encode(self, states: Tensor) -> list[Payload]:
        """Return each row of ``states`` as it would be held."""
        return [self.codec.encode(row) for row in states.split(1)]

    def put(self, keys: Sequence[int], payloads: Sequence[Payload]) -> None:
        """Keep what ``encode`` returned."""
        for key, payload in zip(keys, payloads, strict=True):
            self._specs[key] = payload.spec
            self.store.put(key, payload.parts)

    def drop(self, keys: Iterable[int] | None = None) -> None:
        """Forget some keys, or all."""
        gone = list(self._specs) if keys is None else list(keys)
        self.store.drop(None if keys is None else gone)
        for k in gone:
            self._specs.pop(k, None)

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything held as plain tensors, ready for safetensors."""
        out: dict[str, Tensor] = {}
        for key in self.store.keys():  # noqa: SIM118
            out[f"{key}.shape"] = torch.tensor(self._specs[key].shape, dtype=torch.int64)
            for i, part in enumerate(self.store.get(key) or ()):
                out[f"{key}.{i}"] = part.clone()
        return out

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace everything held by what ``state_dict`` returned."""
        self.drop()
        parts: dict[int, dict[int, Tensor]] = {}
        for name, tensor in state.items():
            key, _, field = name.partition(".")
            if field == "shape":
                self._specs[int(key)] = TensorSpec(tuple(tensor.tolist()))
                parts.setdefault(int(key), {})
            else:
                parts.setdefault(int(key), {})[int(field)] = tensor
        for k, held in parts.items():
            self.store.put(k, tuple(held[i] for i in sorted(held)))


def under(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries of ``state`` whose names begin with ``prefix``, named without it."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
