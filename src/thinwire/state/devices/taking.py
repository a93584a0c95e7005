"""A trainer's tensors, brought into the live words of a history: on the host, or where the tensors are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from thinwire.state import content, intake
from thinwire.state.devices.resident import Found, Resident, filled, placed
from thinwire.state.find_changes import Changes, listed, replaced
from thinwire.state.intake import Overflows
from thinwire.state.layout import Array, Layout
from thinwire.state.patches.moves import Move
from thinwire.state.threads import by_runs
from thinwire.state.words import Words

Overwrite = Callable[[int], Array]  # the live words of a piece, to be changed


class TensorIntake:
    """Bring words up to tensors; the only owner of those words that are on other devices too."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.overflows = layout, Overflows()
        self._residents: list[Resident] = []

    def named(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the tensor of each slot. Errors: ``InputError`` naming one that does not fit."""
        return intake.named(self.layout, tensors)

    def writable(self) -> AbstractContextManager[object]:
        """Let words on a card be such that they can be written to in any mode."""
        return torch.inference_mode(False)

    def first(self, found: list[Tensor]) -> Words:
        """Return the words of tensors that nobody has yet."""
        words, self._residents = filled(self.layout, found, self.overflows)
        return words

    def take(
        self, found: list[Tensor], words: Words, overwrite: Overwrite, made: list[Move]
    ) -> tuple[int, list[Resident]]:
        """Bring the live words up to the tensors, and add to ``made`` what changed.

        Returns by how much the hash moves, and the words on other devices, which are to be ``settled``.
        """
        residents = self._resident(found, words)
        steps = [
            self._take_here(own, intake.flats(self.layout, own, found), overwrite, made)
            for own in intake.batches(self.layout, found)
        ]
        steps += [self._take_listed(r.changes(found, self.overflows), overwrite, made) for r in residents]
        made.sort(key=lambda move: move.piece)
        return content.add(*steps), residents

    def settle(self, residents: Sequence[Resident]) -> None:
        """Let words on other devices be what ``take`` found."""
        for resident in residents:
            resident.settle()

    def keep(self, residents: list[Resident]) -> None:
        """Have these again the next time: until then, after a failure, they are copied there anew."""
        self._residents = residents

    def _take_here(
        self, own: list[int], flats: dict[int, Tensor], overwrite: Overwrite, made: list[Move]
    ) -> int:
        pieces = self.layout.blocks()

        def take(index: int) -> int:
            piece, words = pieces[index], overwrite(index)
            slot, new = self.layout.slots[piece.slot], flats[piece.slot][piece.start : piece.stop]
            keep = partial(_note, made, index)
            return _step(intake.take(slot, new, words, keep, self.overflows.look), index)

        sums = by_runs(lambda run: sum(take(i) for i in own[run]), [pieces[i].numel for i in own])
        return content.add(*sums)

    def _take_listed(self, found: list[Found], overwrite: Overwrite, made: list[Move]) -> int:
        def take(one: Found) -> int:
            words, keep = overwrite(one.piece), partial(_note, made, one.piece)
            if one.at is None:
                return _step(replaced(one.new, words, keep), one.piece)
            return _step(listed(one.at - np.int32(one.start), one.new, words, keep), one.piece)

        sums = by_runs(lambda run: sum(take(one) for one in found[run]), [one.new.size for one in found])
        return content.add(*sums)

    def _resident(self, found: list[Tensor], words: Words) -> list[Resident]:
        """Return the live words on the devices that tensors are on.

        They are kept again when the version is settled: after a failure they are copied there anew.
        """
        had, self._residents = self._residents, []
        return [
            next((r for r in had if r.serves(device, slots)), None)
            or Resident(self.layout, device, slots).load(words)
            for device, slots in placed(found).items()
        ]


def _note(made: list[Move], piece: int, took: Changes) -> None:
    if len(took.old):
        made.append(Move(piece, *took))


def _step(took: Changes, piece: int) -> int:
    """Return by how much the hash moves; while the words are in a cache."""
    return content.moved(took.positions, took.old, took.new, piece) if len(took.old) else 0
