"""References on disk: as many as it holds, in bounded memory, read before they are needed.

One thread reads ahead and writes back. It lives while there is work, so a store that nobody closes leaves
nothing behind. The file has no name; a row of bytes for each key lies in a slot of it.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.channels.references import Parts, Store, TensorStore
from thinwire.types import InputError

MEMORY = 256 * 10**6  # bytes that a store keeps in memory unless told otherwise
LINGER = 1.0  # seconds that the thread waits for more work
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
RowLayout = tuple[tuple[torch.dtype, int], ...]  # dtype and length of each part
OPTION = re.compile(
    r"disk(?::(?P<folder>.+?))?(?:,memory=(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[kmgt]?)b)?", re.I
)


def open_store(text: str) -> Callable[[], Store]:
    """Return what makes the stores that an option describes: memory, or disk[:FOLDER][,memory=SIZE].

    Each end of a channel takes a store of its own, so SIZE counts once for each direction that is remembered
    at each end. Errors: ``InputError`` for any other text; a folder is looked at when a store is made.

    >>> open_store("disk,memory=500MB").keywords
    {'folder': None, 'memory': 500000000}
    """
    if text.strip() == "memory":
        return TensorStore
    found = OPTION.fullmatch(text.strip())
    if found is None:
        raise InputError(
            f"references cannot live in {text!r}; "
            "write memory, disk or disk:FOLDER, the latter two also with ,memory=500MB"
        )
    folder, number, unit = found.group("folder", "number", "unit")
    memory = MEMORY if number is None else int(float(number) * UNITS[unit.lower()])
    _check_memory(memory)
    return partial(DiskStore, folder=folder, memory=memory)


def _check_memory(memory: int) -> None:
    if memory < 1:
        raise InputError(f"references on disk cannot do with memory={memory} bytes; give some, such as 500MB")


class DiskJob(NamedTuple):
    """A row to be written, or where there is none yet, to be read."""

    key: int
    slot: FileSlot
    row: ReferenceRow | None


class RowCache:
    """Some of the rows in memory, the least recently used first, and their bytes."""

    def __init__(self) -> None:
        self.rows: OrderedDict[int, ReferenceRow] = OrderedDict()
        self.nbytes = 0

    def add(self, key: int, row: ReferenceRow) -> None:
        self.pop(key)
        self.rows[key] = row
        self.nbytes += row.data.numel()

    def pop(self, key: int) -> ReferenceRow | None:
        row = self.rows.pop(key, None)
        self.nbytes -= row.data.numel() if row else 0
        return row


class DiskStore:
    """Keep references in a file in ``folder`` (default: the system's temporary one), some of them in memory.

    ``memory`` [bytes] bounds the references in memory, one at least: up to half of it what waits to be
    written, up to half what was read ahead, and for the rest the most recently used. ``put`` waits for the
    disk only while its half is full. Where each reference lies is kept besides, in some 170 bytes a key.
    ``prefetch`` may be called from any thread; all else is for one caller at a time. Layouts may differ from
    key to key.
    Errors: ``InputError`` where the folder cannot be used or the disk is full, at the next ``get`` or
    ``put`` if it happened beside the caller.

    >>> import torch
    >>> store = DiskStore(memory=1000)
    >>> for key in range(100):
    ...     store.put(key, (torch.full((25,), float(key)),))
    >>> store.prefetch([7])
    >>> store.get(7)[0][:3], store.resident <= 1000
    (tensor([7., 7., 7.]), True)
    >>> store.close()
    """

    on_host = True

    def __init__(self, folder: Path | str | None = None, memory: int = MEMORY) -> None:
        _check_memory(memory)
        try:
            self._file = SlotFile(folder)
        except OSError as e:
            raise InputError(
                f"references cannot be kept in {folder or tempfile.gettempdir()} ({e.strerror}); "
                "name a folder that can be written"
            ) from e
        self._memory = memory
        self._clean, self._ahead, self._dirty = RowCache(), RowCache(), RowCache()  # a key is in one at most
        self._wanted: dict[int, int] = {}  # to be read ahead, in this order: the call of prefetch, by number
        self._calls = 0
        self._loading: int | None = None
        self._pressed = False  # a put waits for room
        self._error: InputError | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    @property
    def resident(self) -> int:
        """The bytes of references in memory now."""
        with self._changed:
            return self._resident()

    # -- for the caller ------------------------------------------------------------------------------------

    def get(self, key: int) -> Parts | None:
        with self._changed:
            self._wanted.pop(key, None)
            self._changed.wait_for(lambda: self._loading != key)
            self._check()
            row, slot = self._find(key), self._file.slots.get(key)
        if row is None and slot is not None:
            row = self._read(slot)
            with self._changed:
                self._keep(key, slot, row, self._clean)
        return None if row is None else row.parts

    def put(self, key: int, parts: Parts) -> None:
        row = ReferenceRow.empty(tuple((p.dtype, p.numel()) for p in parts))
        for mine, part in zip(row.parts, parts, strict=True):
            mine.copy_(part.detach().reshape(-1))
        with self._changed:
            self._wait_for_room(row.data.numel())
            self._forget(key)  # only now: what was read ahead meanwhile is older
            self._file.place(key, row.layout)
            self._dirty.add(key, row)
            self._work()

    def prefetch(self, keys: Iterable[int]) -> None:
        """Begin to read these keys, as far as half the memory holds them, and return at once."""
        with self._changed:
            for key, row in self._ahead.rows.items():  # announced before: about to be used, or never
                self._clean.add(key, row)
            self._ahead = RowCache()
            self._calls += 1
            self._wanted = {k: call for k, call in self._wanted.items() if call >= self._calls - 1}
            self._wanted.update((k, self._calls) for k in keys if k in self._file.slots)
            self._work()

    def drop(self, keys: Iterable[int] | None = None) -> None:
        with self._changed:
            for key in list(self._file.slots if keys is None else keys):
                self._forget(key)
                self._file.drop(key)

    def keys(self) -> list[int]:
        with self._changed:
            return list(self._file.slots)

    def close(self) -> None:
        """Stop the thread; free memory and disk. The store cannot be used again."""
        self.drop()
        with self._changed:
            self._error = self._error or InputError("references were asked of a store that is closed")
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        self._file.close()

    # -- under the lock ------------------------------------------------------------------------------------

    def _resident(self) -> int:
        return self._clean.nbytes + self._ahead.nbytes + self._dirty.nbytes

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _find(self, key: int) -> ReferenceRow | None:
        """Return what is in memory, from now on the most recently used."""
        ahead = self._ahead.pop(key)
        if ahead is not None:
            self._clean.add(key, ahead)
            self._work()  # there is room to read further
        elif key in self._clean.rows:
            self._clean.rows.move_to_end(key)
        return self._dirty.rows.get(key) or self._clean.rows.get(key)

    def _holds(self, key: int) -> bool:
        """Say whether a row is in memory; one that was used is from now on the most recently used."""
        if key in self._clean.rows:
            self._clean.rows.move_to_end(key)
        return any(key in cache.rows for cache in (self._clean, self._ahead, self._dirty))

    def _forget(self, key: int) -> None:
        self._wanted.pop(key, None)
        for cache in (self._clean, self._ahead, self._dirty):
            cache.pop(key)

    def _wait_for_room(self, nbytes: int) -> None:
        self._pressed = True
        self._work()
        self._changed.wait_for(
            lambda: self._error or not self._dirty.rows or self._dirty.nbytes + nbytes <= self._memory // 2
        )
        self._pressed = False
        self._check()
        self._make_room(nbytes, self._clean, self._ahead)

    def _make_room(self, nbytes: int, *caches: RowCache) -> bool:
        for cache in caches:
            while cache.rows and self._resident() + nbytes > self._memory:
                cache.pop(next(iter(cache.rows)))
        return self._resident() + nbytes <= self._memory

    def _keep(self, key: int, slot: FileSlot, row: ReferenceRow, cache: RowCache) -> None:
        """Keep what was read, if there is room and nothing newer."""
        current = self._file.slots.get(key) is slot and not self._holds(key)
        if current and self._make_room(row.data.numel(), self._clean):
            cache.add(key, row)

    def _read(self, slot: FileSlot) -> ReferenceRow:
        try:
            return self._file.read(slot)
        except OSError as e:
            raise self._lost(e) from e

    def _lost(self, e: Exception) -> InputError:
        return InputError(
            f"references are lost on disk in {self._file.folder} ({getattr(e, 'strerror', None) or e}); "
            "free space there or name another folder"
        )

    # -- the thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Let the thread look what there is to do."""
        self._changed.notify_all()
        if self._thread is None and self._job() is not None:
            self._thread = threading.Thread(target=self._run, name="references on disk", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (job := self._await_job()) is not None:
            try:
                row = job.row or self._file.read(job.slot)
                if job.row:
                    self._file.write(job.slot, row)
                self._done(job, row)
            except Exception as e:
                self._fail(job, e)

    def _await_job(self) -> DiskJob | None:
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._job(), LINGER)
            job = self._job()
            if job is None:
                self._thread = None
            elif job.row is None:
                del self._wanted[job.key]
                self._loading = job.key
            return job

    def _job(self) -> DiskJob | None:
        """Return what is to be done next: reads first, unless a put waits."""
        if self._error is not None:
            return None
        key = None if self._pressed else self._next_wanted()
        if key is not None:
            return DiskJob(key, self._file.slots[key], None)
        for key, row in self._dirty.rows.items():
            return DiskJob(key, self._file.slots[key], row)
        return None

    def _next_wanted(self) -> int | None:
        """Return a key that is to be read ahead and has room, without that of what else was read ahead."""
        while self._wanted:
            key = next(iter(self._wanted))
            slot = self._file.slots.get(key)
            if slot is not None and slot.nbytes <= self._memory and not self._holds(key):
                ahead, n = self._ahead.nbytes, slot.nbytes
                fits = ahead + n <= self._memory // 2 or not ahead
                return key if fits and ahead + self._dirty.nbytes + n <= self._memory else None
            del self._wanted[key]
        return None

    def _done(self, job: DiskJob, row: ReferenceRow) -> None:
        with self._changed:
            if job.row is None:
                self._loading = None
                self._keep(job.key, job.slot, row, self._ahead)
            elif self._dirty.rows.get(job.key) is row:  # and was not put again meanwhile
                self._dirty.pop(job.key)
                self._clean.add(job.key, row)
            self._changed.notify_all()

    def _fail(self, job: DiskJob, e: Exception) -> None:
        with self._changed:
            self._loading = None
            if self._file.slots.get(job.key) is job.slot:  # what was dropped meanwhile is no loss
                self._error = self._error or self._lost(e)
            self._changed.notify_all()


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
