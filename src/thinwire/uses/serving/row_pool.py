"""TextRows of a cache: each request has some in one piece, and a layer keeps its keys and values in them.

All stages of a ring have as many rows. The first stage gives them to requests; the others do as it says.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.types import InputError, PayloadError, require
from thinwire.uses.serving.choosing.draft_tree import DraftTree, depths


class TextRows(NamedTuple):
    """TextRows of one request: position p of its tokens is in row ``first`` + p."""

    first: int
    many: int

    @property
    def end(self) -> int:
        """The row behind the last one."""
        return self.first + self.many


class RowCopy(NamedTuple):
    """What a request finds done: its first ``many`` tokens are those in the rows from ``first`` on."""

    first: int
    many: int


NO_COPY = RowCopy(0, 0)


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

    def check(self, many: int) -> None:
        """Raise ``InputError`` for a text of so many tokens, if it never fits."""
        wrong = f"{many} tokens of prompt and answer do not fit into a cache of {self.many}"
        require(many <= self.many, InputError, f"{wrong}; ask for fewer, or serve with more --cache")

    def take(self, many: int) -> TextRows | None:
        """Return so many rows, or None while there are not so many in one piece."""
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

    def shortened(self, rows: TextRows, many: int) -> TextRows:
        """Return the first ``many`` of a request's rows, which it keeps; the others are free."""
        found = TextRows(rows.first, many)
        self._held[self._held.index(rows)] = found
        return found

    @property
    def free(self) -> int:
        """TextRows that nobody has, perhaps in pieces."""
        return self.many - sum(held.many for held in self._held)


class TextSegment(NamedTuple):
    """Tokens of one request that pass the stages together: ``many`` from position ``at`` on, in ``rows``.

    Where they are a token and a tree of drafts behind it, ``parents`` has the parent of each draft, from 0,
    and -1 for the token. They are in rows behind each other, while a draft's position is its depth.
    """

    request: int
    rows: TextRows
    at: int
    many: int
    parents: tuple[int, ...] = ()

    def check(self, total: int) -> None:
        """Raise ``PayloadError`` for a segment that is not within its rows, or whose rows are not there."""
        good = not self.parents or len(self.parents) == self.many - 1
        good = good and DraftTree(self.parents).is_ordered
        require(good, PayloadError, f"{self.many} tokens by a tree {self.parents}")
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
        rows = [torch.arange(s.at, s.at + s.many) for s in segments]
        own = [s.at + _depths(s.parents) if s.parents else r for r, s in zip(rows, segments, strict=True)]
        self._places = torch.cat([r + s.rows.first for r, s in zip(rows, segments, strict=True)])
        self._span = next(iter(ends.values())) if len(ends) == 1 else None
        seen = [torch.arange(rows.many) for rows in ends.values()]
        self._seen = torch.cat([p + r.first for p, r in zip(seen, ends.values(), strict=True)])
        asks = torch.cat([torch.full((s.many,), s.request) for s in segments])
        has = torch.cat([torch.full((r.many,), request) for request, r in ends.items()])
        positions, before = torch.cat(own), torch.cat(seen)
        trees = list(_trees(segments, ends))
        for s, _, start in trees:  # drafts are at rows behind each other, wherever in the text they are
            before[start : start + s.many] = s.at + _depths(s.parents)
        apart = positions[:, None] - before[None]
        common = (asks[:, None] == has[None]) & (apart >= 0)
        for s, at, start in trees:
            common[at : at + s.many, start : start + s.many] = _way(s.parents)
        found = {"positions": positions[None].to(self._device)}
        for kind, window in self._windows.items():
            shown = common if window is None else common & (apart < window)
            mask = torch.zeros(shown.shape, dtype=dtype).masked_fill_(~shown, torch.finfo(dtype).min)
            found[kind] = mask[None, None].to(self._device)
        self._places, self._seen = self._places.to(self._device), self._seen.to(self._device)
        return found

    def move(self, rows: TextRows, kept: Sequence[int], to: int) -> None:
        """Move keys and values of a request from its places ``kept`` to those from ``to`` on."""
        taken = torch.tensor(kept, device=self._device) + rows.first
        placed = torch.arange(to, to + len(kept), device=self._device) + rows.first
        for held in (*self._keys.values(), *self._values.values()):
            held.index_copy_(2, placed, held.index_select(2, taken))

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

    @torch.inference_mode()  # as what is there was made
    def copy(self, copied: RowCopy, to: TextRows) -> None:
        """Copy keys and values of some rows to the first ones of a request. Both may have rows in common.

        Errors: ``PayloadError`` for rows that are not there.
        """
        first, n = copied
        good = 0 <= first <= first + n <= self.many and n <= to.many and 0 <= to.first <= self.many - to.many
        require(good, PayloadError, f"rows {tuple(to)} copied from {tuple(copied)} of {self.many}")
        for kept in (*self._keys.values(), *self._values.values()):
            kept[:, :, to.first : to.first + n] = kept[:, :, first : first + n].clone()

    def rows(self, at: TextRows) -> dict[str, Tensor]:
        """Return copies on the CPU of keys and values [heads, many, width] in rows, by kind and layer."""
        return {
            f"{kind}.{layer}": kept[0, :, at.first : at.end].to("cpu", copy=True).contiguous()
            for kind, of_all in (("keys", self._keys), ("values", self._values))
            for layer, kept in of_all.items()
        }

    @torch.inference_mode()
    def put_rows(self, held: dict[str, Tensor], at: TextRows) -> None:
        """Put what ``rows`` returned into some rows. Errors: ``PayloadError`` where it does not fit."""
        for name, x in held.items():
            kind, _, layer = name.partition(".")
            of_all = {"keys": self._keys, "values": self._values}.get(kind)
            good = of_all is not None and layer.isdecimal() and x.dim() == 3 and x.shape[1] == at.many
            require(good and at.end <= self.many, PayloadError, f"stored rows {name} of {tuple(x.shape)}")
            if of_all is None:
                return
            if int(layer) not in of_all:
                of_all[int(layer)] = x.new_zeros(1, x.shape[0], self.many, x.shape[2], device=self._device)
            kept = of_all[int(layer)]
            fits = kept.dtype == x.dtype and (kept.shape[1], kept.shape[3]) == (x.shape[0], x.shape[2])
            require(fits, PayloadError, f"stored rows {name} of {x.dtype} and {tuple(x.shape)}")
            kept[0, :, at.first : at.end] = x.to(self._device)

    def get_seq_length(self, *_layer: object) -> int:
        """Return 0: positions are always given."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, used or not."""
        kept = [*self._keys.values(), *self._values.values()]
        return sum(x.numel() * x.element_size() for x in kept)


def _depths(parents: Sequence[int]) -> Tensor:
    """Return how many tokens of a segment with a tree stand before each, on its way [n]."""
    return torch.tensor([0, *depths(parents)])


def _way(parents: Sequence[int]) -> Tensor:
    """Return what each token of a segment with a tree sees of it [n, n]: those on its way, and itself."""
    n = 1 + len(parents)
    found = torch.eye(n, dtype=torch.bool)
    for i, parent in enumerate(parents):
        found[i + 1] |= found[parent + 1]
    return found


def _trees(
    segments: Sequence[TextSegment], ends: Mapping[int, TextRows]
) -> Iterator[tuple[TextSegment, int, int]]:
    """Yield segments with a tree: the first of their places among all tokens, and among all that is seen."""
    first, begin = 0, dict[int, int]()
    for request, rows in ends.items():
        begin[request], first = first, first + rows.many
    at = 0
    for s in segments:
        if s.parents:
            yield s, at, begin[s.request] + s.at
        at += s.many
