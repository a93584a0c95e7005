"""A client's copy of the model: what the versions that it was sent add up to."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import SHARED, Receiver
from thinwire.channels.memory import Delta
from thinwire.channels.rows import checks
from thinwire.codecs import Raw
from thinwire.rounds.parameters import most_nbytes, unpack_row
from thinwire.rounds.update_messages import Held, VersionForm, VersionMessage
from thinwire.state.layout import Layout
from thinwire.state.patches.patch import Patch
from thinwire.state.replica import Replica
from thinwire.types import (
    DesyncError,
    Entry,
    Mode,
    Packet,
    PayloadError,
    Section,
    TensorSpec,
    ThinwireError,
    require,
)

NAME = "model"  # of the one tensor of a shared model, in patches


def sum_of(row: Tensor) -> int:
    """Return a 32-bit sum over a row [1, N]: equal bits, equal sums."""
    return checks(row)[0]


def whole(row: Tensor, number: int) -> bytes:
    """Return the packet that sets the shared model to ``row`` [1, N], version ``number``, whatever it was."""
    section = Section(Mode.KEYFRAME, repr(Raw()), Raw().encode(row))
    entry = Entry(SHARED, number + 1, 0, sum_of(row))
    return wire.pack(Packet(TensorSpec.of(row), repr(Delta()), repr(Raw()), (entry,), (section,)))


@lru_cache(maxsize=8)
def layout_of(values: int) -> Layout:
    """Return the layout of a shared model of so many values, for patches."""
    return Layout.of({NAME: torch.zeros(1, values)})


class ModelCopy:
    """Follow the versions that a server sends to one client.

    ``values``: parameters of the model. ``initial`` [1, N]: version 0, where both ends make it of the same
    seed; then it need not be sent if downloads are deltas. ``device``: where versions are decoded and held.
    """

    def __init__(
        self, values: int, initial: Tensor | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self._values, self._device = values, torch.device(device)
        self._receiver = Receiver()
        self._row: Tensor | None = None
        self._sum = 0  # over it, as its last message said and was found to say
        self.held: Held | None = None  # what the next version may lead on from
        if initial is not None:
            self.hold(initial, 0)

    @property
    def row(self) -> Tensor | None:
        """What is held, [1, N], not to be written to; None where nothing is."""
        return self._row

    def hold(self, row: Tensor, number: int) -> None:
        """Hold ``row`` [1, N] as version ``number``, as it was kept elsewhere."""
        self._set(row, number)
        self.held = Held(number, sum_of(row))

    def take(self, version: VersionMessage) -> Tensor:
        """Return the values of ``version`` [1, N], float32, not to be written to.

        Errors: ``PayloadError`` or ``DesyncError``; then nothing is held, and the next version comes whole.
        """
        try:
            row = self._values_of(version)
            wrong = f"version {version.number} differs from the server's; ask for all of it"
            found = sum_of(row) if version.form is VersionForm.FULL else self._sum
            require(found == version.check, DesyncError, wrong)
        except ThinwireError:
            self.drop()
            raise
        if version.form is not VersionForm.FULL:
            self._row, self.held = row, version.held
        return row

    def drop(self) -> None:
        """Hold nothing."""
        self._receiver.reset()
        self._row = self.held = None

    def _values_of(self, version: VersionMessage) -> Tensor:
        if version.form is VersionForm.FULL:
            return unpack_row(version.packets[0], self._values, SHARED, self._device)
        if version.form is VersionForm.WHOLE:
            return self._patched(None, version)
        row, base = self._row, version.number - len(version.packets)
        held = None if self.held is None else self.held.number
        if row is None or held is None or (version.form is VersionForm.MISSED and held != base):
            raise DesyncError(f"version {version.number} leads on from another than is held, {held}")
        if version.form is VersionForm.PATCH:
            return self._patched(row, version)
        for number, data in enumerate(version.packets, base + 1):
            row = self._follow(data, number)
        return row

    def _patched(self, row: Tensor | None, version: VersionMessage) -> Tensor:
        """Return what the patch in ``version`` makes of ``row``, or of nothing, and hold that."""
        layout = layout_of(self._values)
        patch = Patch.unpack(version.packets[0], most_nbytes(self._values))
        fits = patch.version == version.number + 1 and (patch.base == 0) is (row is None)
        require(fits, PayloadError, f"what came for version {version.number} is no patch to it")
        replica = Replica(layout, 0)
        if row is not None:
            replica.start({NAME: row.cpu()})
        replica.apply(patch)
        replica.swap()
        return self._set(replica.tensors()[NAME].clone(), version.number)

    def _set(self, row: Tensor, number: int) -> Tensor:
        self._receiver.reset()
        return self._follow(whole(row, number), number)

    def _follow(self, data: bytes | memoryview, number: int) -> Tensor:
        """Decode a message of the shared model, the one that leads to version ``number``, and hold that."""
        most = most_nbytes(self._values)
        require(len(data) <= most, PayloadError, f"version {number} takes {len(data)} bytes, over {most}")
        packet = wire.unpack(data, max_nbytes=4 * self._values, device=self._device)
        entries = [(e.key, e.version) for e in packet.entries]
        fits = packet.memory == repr(Delta()) and entries == [(SHARED, number + 1)]
        require(fits, PayloadError, f"what came for version {number} is no message of it")
        self._row = self._receiver.decode(packet, expect=TensorSpec((1, self._values), torch.float32))
        self._sum = packet.entries[0].check
        return self._row
