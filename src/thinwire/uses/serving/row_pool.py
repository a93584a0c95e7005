"""TextRows of a cache: each request has some in one piece, and a layer keeps its keys and values in them.

All stages of a ring have as many rows. The first stage gives them to requests; the others do as it says.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.types import InputError, PayloadError, require


class TextRows(NamedTuple):
    """TextRows of one request: position p of its tokens is in row ``first`` + p."""

    first: int
    many: int

    @property
    def end(self) -> int:
        """The row behind the last one."""
        return self.first + self.many


class RowAllocator:
    """Give rows of ``many`` to requests, each in one piece, by first fit.

    >>> rows = RowAllocator(100)
    >>> held = rows.take(60)
    >>> held, rows.take(60)
    (TextRows(first=0, many=60), None)
    >>> rows.give_back(held)
    >>> rows.take(60)
    TextRows(first=0, many=60)
    """

    def __init__(self, many: int) -> None:
        self.many = many
        self._held: list[TextRows] = []  # by their first row

    def take(self, many: int) -> TextRows | None:
        """Return so many rows, or None while there are not so many in one piece.

        Errors: ``InputError`` where there never are.
        """
        wrong = f"{many} tokens do not fit into a cache of {self.many}; send less, or serve with more"
        require(0 < many <= self.many, InputError, wrong)
        at = 0
        for held in [*self._held, TextRows(self.many, 0)]:
            if held.first - at >= many:
                found = TextRows(at, many)
                bisect.insort(self._held, found)
                return found
            at = held.end
        return None

    def give_back(self, rows: TextRows) -> None:
        """Let others have what one request had."""
        self._held.remove(rows)

    @property
    def free(self) -> int:
        """TextRows that nobody has, perhaps in pieces."""
        return self.many - sum(held.many for held in self._held)


class TextSegment(NamedTuple):
    """Tokens of one request that pass the stages together: ``many`` from position ``at`` on, in ``rows``."""

    request: int
    rows: TextRows
    at: int
    many: int

    def check(self, total: int) -> None:
        """Raise ``PayloadError`` for a segment that is not within its rows, or whose rows are not there."""
        within = self.at >= 0 and self.many > 0 and self.at + self.many <= self.rows.many
        there = self.rows.first >= 0 and self.rows.end <= total
        wrong = f"tokens {self.at} to {self.at + self.many} in rows {tuple(self.rows)} of {total}"
        require(within and there, PayloadError, wrong)


class StageCache:
    """Keys and values of all layers of a stage, as models of transformers use a cache.

    ``begin`` says which tokens come next. Then each layer puts theirs into their rows, and gets those of all
    rows that these tokens may see. ``windows``: by kind of layer, how far it looks back (None: to the
    beginning). Values are on ``device``.
    """

    is_compileable = False

    def __init__(self, many: int, windows: dict[str, int | None], device: torch.device) -> None:
        self.many, self._windows, self._device = many, windows, device
        self._keys: dict[int, Tensor] = {}  # [1, heads, rows, width] by layer
        self._values: dict[int, Tensor] = {}
        self._places = self._seen = torch.empty(0, dtype=torch.int64)
        self._span: TextRows | None = None  # what is seen, where that is one piece

    def begin(self, segments: list[TextSegment], dtype: torch.dtype) -> dict[str, Tensor]:
        """Take tokens; return their positions [1, n] and, by kind of layer, masks [1, 1, n, seen]."""
        ends = dict[int, TextRows]()
        for s in segments:
            many = max(s.at + s.many, ends[s.request].many if s.request in ends else 0)
            ends[s.request] = TextRows(s.rows.first, many)
        own = [torch.arange(s.at, s.at + s.many) for s in segments]
        self._places = torch.cat([p + s.rows.first for p, s in zip(own, segments, strict=True)])
        self._span = next(iter(ends.values())) if len(ends) == 1 else None
        seen = [torch.arange(rows.many) for rows in ends.values()]
        self._seen = torch.cat([p + r.first for p, r in zip(seen, ends.values(), strict=True)])
        asks = torch.cat([torch.full((s.many,), s.request) for s in segments])
        has = torch.cat([torch.full((r.many,), request) for request, r in ends.items()])
        positions, before = torch.cat(own), torch.cat(seen)
        apart = positions[:, None] - before[None]
        common = (asks[:, None] == has[None]) & (apart >= 0)
        found = {"positions": positions[None].to(self._device)}
        for kind, window in self._windows.items():
            shown = common if window is None else common & (apart < window)
            mask = torch.zeros(shown.shape, dtype=dtype).masked_fill_(~shown, torch.finfo(dtype).min)
            found[kind] = mask[None, None].to(self._device)
        self._places, self._seen = self._places.to(self._device), self._seen.to(self._device)
        return found

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_args: object, **_options: object
    ) -> tuple[Tensor, Tensor]:
        """Put a layer's keys and values [1, heads, n, width] into their rows; return those that are seen."""
        return self._put(self._keys, layer, keys), self._put(self._values, layer, values)

    def _put(self, of_all: dict[int, Tensor], layer: int, x: Tensor) -> Tensor:
        if layer not in of_all:
            of_all[layer] = x.new_zeros(1, x.shape[1], self.many, x.shape[3])
        kept = of_all[layer]
        kept.index_copy_(2, self._places, x)
        if self._span is None:
            return kept.index_select(2, self._seen)
        return kept[:, :, self._span.first : self._span.end]

    def get_seq_length(self, *_layer: object) -> int:
        """Return 0: positions are always given."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, used or not."""
        kept = [*self._keys.values(), *self._values.values()]
        return sum(x.numel() * x.element_size() for x in kept)
