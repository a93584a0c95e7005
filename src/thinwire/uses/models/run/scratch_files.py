"""Tensors that wait on the disk for their turn, so that memory holds those of one layer."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.runs.machine.cache import cache_folder
from thinwire.uses.models.moments import Moments

ROWS = 256  # of a symmetric matrix that are kept together


class FileRange(NamedTuple):
    """Where a tensor of float32 waits: its first byte, and its shape."""

    at: int
    shape: tuple[int, ...]


class Scratch:
    """A file without a name in the cache's folder, for tensors of float32; it goes when nothing refers to it.

    >>> scratch = Scratch()
    >>> scratch.get(scratch.put(torch.tensor([[1.0, 2.0]])))
    tensor([[1., 2.]])
    """

    def __init__(self) -> None:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as this does
        weakref.finalize(self, self._file.close)
        self._end = 0

    def put(self, x: Tensor) -> FileRange:
        """Keep a tensor."""
        place = FileRange(self._end, tuple(x.shape))
        self._file.seek(place.at)
        self._end += self._file.write(x.detach().cpu().contiguous().numpy().data)
        return place

    def get(self, place: FileRange) -> Tensor:
        """Return a tensor that was kept."""
        found = torch.empty(place.shape)
        self._file.seek(place.at)
        self._file.readinto(found.numpy().data)
        return found

    def put_moments(self, own: Moments) -> KeptMoments:
        """Keep moments: of their columns the half that is not the other one turned over."""
        columns = own.columns
        starts = range(0, len(columns), ROWS)
        parts = [self.put(columns[i : i + ROWS, i:]) for i in starts]
        return KeptMoments(self, self.put(own.rows), parts)


class KeptMoments(NamedTuple):
    """Moments that wait on the disk."""

    scratch: Scratch
    rows: FileRange
    parts: list[FileRange]

    def moments(self) -> Moments:
        """Return them."""
        n = self.parts[0].shape[1] if self.parts else 0
        columns = torch.empty(n, n)
        for i, place in enumerate(self.parts):
            start, own = ROWS * i, self.scratch.get(place)
            columns[start : start + ROWS, start:] = own
            columns[start:, start : start + ROWS] = own.t()
            square = own[:, : len(own)]  # both halves of what lies on the diagonal were kept
            columns[start : start + ROWS, start : start + ROWS] = square
        return Moments(self.scratch.get(self.rows), columns)


class Waiting(Mapping[str, Moments]):
    """Moments by name, each read when it is asked for."""

    def __init__(self, kept: Mapping[str, Callable[[], Moments]]) -> None:
        self._kept = dict(kept)

    def __getitem__(self, name: str) -> Moments:
        return self._kept[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def under(self, names: Mapping[str, str]) -> Waiting:
        """Return them under other names: new -> old, where there are any of the old one."""
        return Waiting({new: self._kept[old] for new, old in names.items() if old in self._kept})
