"""Words of a state on the device where a trainer's tensors are: they are cast and compared there.

Only what changed comes to the host, all of a version in one copy, and so does the one wait for it: how many
words changed is not known before, so there is room for a few more than the last time. Where that was not
enough, or a first time, they are counted before. The host has the same words, from which patches are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.staging import Staged, to_device, to_host
from thinwire.state import intake, lossy
from thinwire.state.devices.tensor_words import INTEGERS, taken
from thinwire.state.find_changes import words_of
from thinwire.state.intake import Overflows
from thinwire.state.layout import Array, Layout, Slot
from thinwire.state.threads import by_runs
from thinwire.state.words import Words
from thinwire.types import InputError

STRETCH = 1 << 27  # bytes of words that are compared at once
_DENSE = 5  # where more than one in so many changed, all words come: positions would take as much
_SPARE = 4  # one in so many more may change than the last time
_LEAST = 1 << 10


class Found(NamedTuple):
    """What a piece's words are now: ``at`` some [n], rising, counted from ``start`` on; or all of them.

    The arrays are for reading at once: the memory serves other copies later.
    """

    piece: int
    at: Array | None
    new: Array
    start: int = 0


class _Part(NamedTuple):
    """Words ``start`` to ``stop`` of a slot, which are at ``at`` in a stretch."""

    slot: int
    start: int
    stop: int
    at: int


class _Seen(NamedTuple):
    """What one look at a stretch found, on its device; ``now`` where all words are to come."""

    many: Tensor  # words that changed
    ends: Tensor  # of each part the largest word without its sign, or whether it does not fit its bound
    at: Tensor | None = None
    now: Tensor | None = None

    def parts(self) -> list[Tensor]:
        """Return what is to come to the host."""
        at = [] if self.at is None else [self.at.int()]
        return [self.many, self.ends, *at, *([] if self.now is None else [self.now])]


class _Stretch:
    """Words of neighbouring pieces, all of one kind, as one tensor."""

    def __init__(self, layout: Layout, pieces: Sequence[int]) -> None:
        self.pieces, self.parts = pieces, list[_Part]()
        known = [layout.blocks()[i] for i in pieces]
        self.starts = list(accumulate((piece.numel for piece in known), initial=0))
        for piece, at in zip(known, self.starts, strict=False):
            last = self.parts[-1] if self.parts else None
            if last is not None and last.slot == piece.slot:
                self.parts[-1] = last._replace(stop=piece.stop)
            else:
                self.parts.append(_Part(piece.slot, piece.start, piece.stop, at))
        self.word, self.numel = known[0].word, self.starts[-1]
        self.held = torch.empty(0)
        self.room: int | None = None  # for changes; None: they are counted first
        self.dense = False  # all words come

    def expect(self, count: int) -> None:
        """Make room for about so many changes the next time."""
        self.room = min(self.numel, count + count // _SPARE + _LEAST)
        self.dense = self.room * _DENSE > self.numel


class Resident:
    """The live words of those ``slots`` whose tensors are on one device; ``first`` or ``load`` begins."""

    def __init__(self, layout: Layout, device: torch.device, slots: Sequence[int]) -> None:
        self.layout, self.device, self.slots = layout, device, list(slots)
        own = set(slots)
        by_word: dict[np.dtype, list[int]] = {}
        for i, piece in enumerate(layout.blocks()):
            if piece.slot in own:
                by_word.setdefault(piece.word, []).append(i)
        self._stretches = [
            _Stretch(layout, run)
            for word, pieces in by_word.items()
            for run in _runs(pieces, [layout.blocks()[i].numel * word.itemsize for i in pieces])
        ]
        self._news: list[tuple[_Stretch, Tensor | None, Tensor]] = []

    def serves(self, device: torch.device, slots: Sequence[int]) -> bool:
        """Return whether these are the words of tensors on ``device`` of ``slots``."""
        return self.device == device and self.slots == list(slots)

    def first(self, found: Sequence[Tensor], words: Words, overflows: Overflows | None) -> None:
        """Take the words of tensors that nobody has yet, and write them into ``words`` too.

        Errors: ``InputError`` for NaN in a lossy tensor.
        """
        coming: list[tuple[_Stretch, Staged]] = []
        for stretch in self._stretches:
            held = torch.zeros(stretch.numel, dtype=INTEGERS[stretch.word], device=self.device)
            stretch.held, ends = self._now(stretch, found, held)
            coming.append((stretch, to_host([ends, stretch.held])))
            if len(coming) > 1:  # the one before is copied while this one is computed
                self._land(*coming.pop(0), found, words, overflows)
        for stretch, staged in coming:
            self._land(stretch, staged, found, words, overflows)

    def _land(
        self,
        stretch: _Stretch,
        staged: Staged,
        found: Sequence[Tensor],
        words: Words,
        overflows: Overflows | None,
    ) -> None:
        ends, held = staged.tensors()
        self._check(stretch, words_of(ends), found, overflows)
        new = words_of(held)

        def write(run: slice) -> None:
            for i, at in zip(stretch.pieces[run], stretch.starts[run], strict=True):
                words[i][:] = new[at : at + words[i].size]

        by_runs(write, [words[i].size for i in stretch.pieces])

    def load(self, words: Words) -> Resident:
        """Take the words that the host has, and return this."""
        for stretch in self._stretches:
            joined = np.concatenate([words[i] for i in stretch.pieces])
            (stretch.held,) = to_device(joined.data, [(INTEGERS[stretch.word], joined.size)], self.device)
        return self

    def changes(self, found: Sequence[Tensor], overflows: Overflows) -> list[Found]:
        """Return what differs from the words; they stay as they are until ``settle``.

        Errors: ``InputError`` for NaN in a lossy tensor.
        """
        self._news, made, stretches = [], list[Found](), self._stretches
        while stretches:
            seen = [self._look(stretch, found) for stretch in stretches]
            staged = to_host([part for one in seen for part in one.parts()])
            rows, again = iter(staged.tensors()), list[_Stretch]()
            for stretch, one in zip(stretches, seen, strict=True):
                own = [words_of(next(rows)) for _ in one.parts()]
                if not self._enough(stretch, int(own[0][0]), one):
                    again.append(stretch)
                    continue
                self._check(stretch, own[1], found, overflows)
                made += self._found(stretch, int(own[0][0]), one, own[2:])
            stretches = again
        return made

    def settle(self) -> None:
        """Take over what ``changes`` found."""
        news, self._news = self._news, []
        for stretch, at, new in news:
            if at is None:
                stretch.held = new
            else:
                stretch.held.index_copy_(0, at, new)

    def _look(self, stretch: _Stretch, found: Sequence[Tensor]) -> _Seen:
        now, ends = self._now(stretch, found, stretch.held)
        differs = now != stretch.held
        count = differs.sum()
        if stretch.room is None:
            return _Seen(count, ends)
        if stretch.dense:
            return _Seen(count, ends, None, now)
        at = _where(differs, stretch.room)
        return _Seen(count, ends, at, now.index_select(0, at))

    def _now(self, stretch: _Stretch, found: Sequence[Tensor], held: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the words are now, in memory of their own, and what ``_check`` looks at."""
        now = torch.empty_like(held)
        ends = torch.zeros(len(stretch.parts), dtype=held.dtype, device=self.device)
        for i, (index, start, stop, at) in enumerate(stretch.parts):
            slot, x = (
                self.layout.slots[index],
                intake.plain(found[index]).contiguous().reshape(-1)[start:stop],
            )
            into = now[at : at + stop - start]
            if slot.bound is not None:
                ends[i] = lossy.settle_there(x, held[at : at + stop - start], slot.bound, slot.dtype, into)
            elif x.dtype == taken(slot):
                into.copy_(x.view(into.dtype))
            else:
                into.view(taken(slot)).copy_(x)
                if intake.narrows(x.dtype, slot.dtype):
                    ends[i] = (into & torch.iinfo(into.dtype).max).amax()
        return now, ends

    def _check(
        self, stretch: _Stretch, ends: Array, found: Sequence[Tensor], overflows: Overflows | None
    ) -> None:
        for (index, *_), end in zip(stretch.parts, ends.tolist(), strict=True):
            slot, x = self.layout.slots[index], found[index]
            if slot.bound is not None and end:
                _refuse(slot, x)
            if slot.bound is None and overflows is not None and intake.narrows(x.dtype, slot.dtype):
                overflows.note(slot, x, end)

    def _enough(self, stretch: _Stretch, count: int, seen: _Seen) -> bool:
        """Return whether all that changed has come; make room where it has not, and for the next time."""
        came = seen.now is not None and (seen.at is None or count <= seen.at.numel())
        stretch.expect(count)
        return came

    def _found(self, stretch: _Stretch, count: int, seen: _Seen, rows: list[Array]) -> Iterator[Found]:
        if seen.now is None or not count:
            return
        if seen.at is None:
            self._news.append((stretch, None, seen.now))
            for i, start, stop in zip(stretch.pieces, stretch.starts, stretch.starts[1:], strict=False):
                yield Found(i, None, rows[0][start:stop])
            return
        self._news.append((stretch, seen.at[:count], seen.now[:count]))
        at, new = rows[0][:count], rows[1][:count]
        ends = at.searchsorted(np.array(stretch.starts, dtype=at.dtype)).tolist()
        for i, start, a, b in zip(stretch.pieces, stretch.starts, ends, ends[1:], strict=False):
            if b > a:
                yield Found(i, at[a:b], new[a:b], start)


def _runs(pieces: list[int], sizes: list[int]) -> list[list[int]]:
    """Return runs of pieces of at most about ``STRETCH`` bytes."""
    found, total = [list[int]()], 0
    for piece, size in zip(pieces, sizes, strict=True):
        if total and total + size > STRETCH:
            found.append([])
            total = 0
        found[-1].append(piece)
        total += size
    return found


def _where(mask: Tensor, room: int) -> Tensor:
    """Return where a mask [n] is set, as int64 [room]; nobody waits for how many that are."""
    return torch.nonzero_static(mask, size=room, fill_value=0).reshape(-1)


def _refuse(slot: Slot, x: Tensor) -> None:
    """Raise what the same pass raises on the host for a tensor that does not fit its bound."""
    there = x.detach().float().cpu().reshape(-1)
    for start in range(0, there.numel(), STRETCH):
        some = there[start : start + STRETCH]
        lossy.settle(some, np.zeros(some.numel(), np.int32), slot.bound or 0.0, slot.name, dtype=slot.dtype)
    raise InputError(f"{slot.name} has values that cannot be kept within a bound of {slot.bound}")


def placed(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """Return which tensors are on each device but the CPU."""
    found: dict[torch.device, list[int]] = {}
    for i, x in enumerate(tensors):
        if x.device.type != "cpu":
            found.setdefault(x.device, []).append(i)
    return found


def filled(
    layout: Layout, tensors: list[Tensor], overflows: Overflows | None = None
) -> tuple[Words, list[Resident]]:
    """Return the words of the tensors of all slots, and those that stay on the tensors' devices.

    Errors: ``InputError`` for NaN in a lossy one.
    """
    words = Words(layout)
    residents = [Resident(layout, device, slots) for device, slots in placed(tensors).items()]
    for own in intake.batches(layout, tensors):
        _fill(own, layout, tensors, words, overflows)
    for resident in residents:
        resident.first(tensors, words, overflows)
    return words, residents


def _fill(
    own: list[int], layout: Layout, tensors: list[Tensor], words: Words, overflows: Overflows | None
) -> None:
    pieces, flats = layout.blocks(), intake.flats(layout, own, tensors)

    def fill(run: slice) -> None:
        for i in own[run]:
            piece = pieces[i]
            new = flats[piece.slot][piece.start : piece.stop]
            intake.fill(layout.slots[piece.slot], new, words[i], overflows.look if overflows else None)

    by_runs(fill, [pieces[i].numel for i in own])
