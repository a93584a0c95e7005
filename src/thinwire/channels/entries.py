"""The entries of a packet as columns: a message of many rows makes no object for each.

A sender on a device does not know the checks before its message crosses: they are ``sums`` there until
``checked`` is given them, or somebody reads one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import overload

import numpy as np
from torch import Tensor

from thinwire import staging
from thinwire.types import MAX_KEY, Entry, PayloadError

ENTRY = np.dtype([("key", "<u8"), ("version", "<u4"), ("check", "<u4"), ("section", "u1")])
FEW = 8  # entries up to which Python's own struct is quicker than numpy
_FEW = [struct.Struct("<" + "QIIB" * n) for n in range(FEW + 1)]
_WRAP = 0xFFFFFFFF  # sums are modulo 2**32


class Entries(Sequence[Entry]):
    """Keys, versions, sections and checks of the entries, a list each; as a sequence, ``Entry`` objects."""

    def __init__(
        self, keys: list[int], versions: list[int], sections: list[int], checks: list[int] | Tensor
    ) -> None:
        self.keys, self.versions, self.sections = keys, versions, sections
        self._checks: list[int] = []
        self.sums: Tensor | None = None  # int32 [n], while they are on a device
        if isinstance(checks, list):
            self._checks = checks
        elif checks.is_cpu:
            self._checks = unsigned(checks)
        else:
            self.sums = checks

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Entries:
        """Return entries as columns."""
        if isinstance(entries, Entries):
            return entries
        columns = zip(*((e.key, e.version, e.section, e.check) for e in entries), strict=True)
        return cls(*map(list, columns))

    @property
    def checks(self) -> list[int]:
        """The checks. Those still on a device are read now."""
        if self.sums is not None:
            self.checked(staging.to_host([self.sums]).tensors()[0])
        return self._checks

    def checked(self, sums: Tensor) -> None:
        """Take what ``sums`` are, from the host."""
        self._checks, self.sums = unsigned(sums), None

    def pack(self) -> bytes:
        """Return the entries as a packet has them."""
        n = len(self.keys)
        if n <= FEW:
            columns = zip(self.keys, self.versions, self.checks, self.sections, strict=True)
            return _FEW[n].pack(*chain.from_iterable(columns))
        rows = np.empty(n, ENTRY)
        rows["key"], rows["version"], rows["check"] = self.keys, self.versions, self.checks
        rows["section"] = self.sections
        return rows.tobytes()

    @classmethod
    def unpack(cls, raw: memoryview, sections: int) -> tuple[Entries, list[int]]:
        """Return the entries in ``raw``, and how many each of ``sections`` has. Errors: ``PayloadError``."""
        n = len(raw) // ENTRY.itemsize
        if n <= FEW:
            flat = _FEW[n].unpack(raw)
            found = cls(*(list(flat[i::4]) for i in (0, 1, 3, 2)))
        else:
            rows = np.frombuffer(raw, dtype=ENTRY)
            found = cls(*(rows[name].tolist() for name in ("key", "version", "section", "check")))
        counts = [found.sections.count(i) for i in range(sections)]
        if not all(counts) or sum(counts) < n:
            raise PayloadError("entries and sections of a packet do not match")
        if len(set(found.keys)) < n or max(found.keys) >= MAX_KEY:
            raise PayloadError("keys of a packet that are not distinct")
        return found, counts

    def rows(self, section: int) -> list[int]:
        """Return which entries are of a section."""
        return [i for i, s in enumerate(self.sections) if s == section]

    @overload
    def __getitem__(self, at: int) -> Entry: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Entry]: ...
    def __getitem__(self, at: int | slice) -> Entry | Sequence[Entry]:
        if isinstance(at, slice):
            return list(self)[at]
        return Entry(self.keys[at], self.versions[at], self.sections[at], self.checks[at])

    def __iter__(self) -> Iterator[Entry]:
        return map(Entry, self.keys, self.versions, self.sections, self.checks)

    def __len__(self) -> int:
        return len(self.keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Iterable) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of any list


def unsigned(sums: Tensor) -> list[int]:
    """Return the sums, int32 [n] on the CPU, as a packet has them."""
    return [v & _WRAP for v in sums.tolist()]
