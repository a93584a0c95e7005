"""A file of references: rows of bytes in slots of one nameless, sparse file."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

RowLayout = tuple[tuple[torch.dtype, int], ...]  # dtype and length of each part


class FileSlot(NamedTuple):
    """Where a row lies in the file."""

    at: int
    layout: RowLayout

    @property
    def nbytes(self) -> int:
        return _nbytes(self.layout)


class ReferenceRow(NamedTuple):
    """The parts of one reference, one after another as in the file."""

    layout: RowLayout
    data: Tensor  # uint8 [n]

    @classmethod
    def empty(cls, layout: RowLayout) -> ReferenceRow:
        """Return a row of that layout, its bytes not set."""
        return cls(layout, torch.empty(_nbytes(layout), dtype=torch.uint8, device="cpu"))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The parts, in place."""
        found, at = [], 0
        for dtype, n in self.layout:
            found.append(self.data[at : at + n * dtype.itemsize].view(dtype))
            at += _aligned(n * dtype.itemsize)
        return tuple(found)


class SlotFile:
    """Rows by key. The file has no name: it is gone with the process, however that ends.

    Only what was written takes space on disk. Nothing here locks; reads and writes of different slots may
    run beside each other.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        if folder is not None:
            Path(folder).mkdir(exist_ok=True)  # in one that is there: no typing error makes more
        file = tempfile.TemporaryFile(prefix="thinwire-references-", dir=folder, buffering=0)  # noqa: SIM115
        self.folder = str(folder or tempfile.gettempdir())
        self.slots: dict[int, FileSlot] = {}
        self.close: Callable[[], object] = weakref.finalize(self, file.close)
        self._fd = file.fileno()
        self._layouts: dict[RowLayout, RowLayout] = {}  # one object for all rows that share a layout
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def place(self, key: int, layout: RowLayout) -> None:
        """Give ``key`` a slot for that layout, the one it has if that fits."""
        old = self.slots.get(key)
        if old is None or old.layout != layout:
            if old is not None:
                self._give_back(old)
            self.slots[key] = FileSlot(self._take(_nbytes(layout)), self._layouts.setdefault(layout, layout))

    def drop(self, key: int) -> None:
        """Give the slot of ``key`` back; the last one shrinks the file to nothing."""
        slot = self.slots.pop(key, None)
        if slot is not None:
            self._give_back(slot)
        if not self.slots and self._end:
            os.ftruncate(self._fd, 0)
            self._free.clear()
            self._end = 0

    def write(self, slot: FileSlot, row: ReferenceRow) -> None:
        """Write a row. Errors: ``OSError``."""
        data, at = row.data.numpy().data, slot.at
        while data:
            done = os.pwrite(self._fd, data, at)
            data, at = data[done:], at + done

    def read(self, slot: FileSlot) -> ReferenceRow:
        """Return the row in a slot. Errors: ``OSError``."""
        row = ReferenceRow.empty(slot.layout)
        data, at = row.data.numpy().data, slot.at
        while data:
            done = os.preadv(self._fd, [data], at)
            if not done:
                raise OSError(f"{len(data)} bytes of a row are missing")
            data, at = data[done:], at + done
        return row

    def _take(self, nbytes: int) -> int:
        room = _room(nbytes)
        if self._free.get(room):
            return self._free[room].pop()
        self._end += room
        return self._end - room

    def _give_back(self, slot: FileSlot) -> None:
        self._free.setdefault(_room(slot.nbytes), []).append(slot.at)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8  # whatever comes next may be viewed in place


def _nbytes(layout: RowLayout) -> int:
    return sum(_aligned(n * dtype.itemsize) for dtype, n in layout)


def _room(nbytes: int) -> int:
    """Return the size of a slot, at most an eighth more: rows of nearly one size can take each other's."""
    step = max(64, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
