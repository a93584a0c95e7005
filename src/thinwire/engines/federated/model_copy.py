"""A client's copy of the model: what the versions that it was sent add up to."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import Receiver
from thinwire.channels.frame import SHARED, checks
from thinwire.channels.memory import Delta
from thinwire.codecs import Raw
from thinwire.engines.federated.message import Form, Held, Version
from thinwire.engines.federated.row import most_nbytes, unpack_row
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


def sum_of(row: Tensor) -> int:
    """Return a 32-bit sum over a row [1, N]: equal bits, equal sums."""
    return checks(row)[0]


def whole(row: Tensor, number: int) -> bytes:
    """Return the packet that sets the shared model to ``row`` [1, N], version ``number``, whatever it was."""
    section = Section(Mode.KEYFRAME, repr(Raw()), Raw().encode(row))
    entry = Entry(SHARED, number + 1, 0, sum_of(row))
    return wire.pack(Packet(TensorSpec.of(row), repr(Delta()), repr(Raw()), (entry,), (section,)))


class ModelCopy:
    """Follow the versions that a server sends; clients of one process that never go back may share a copy.

    ``values``: parameters of the model. ``initial`` [1, N]: version 0, where both ends make it of the same
    seed; then it need not be sent if downloads are deltas.
    """

    def __init__(self, values: int, initial: Tensor | None = None) -> None:
        self._values = values
        self._receiver = Receiver()
        self._row: Tensor | None = None
        self.held: Held | None = None  # what the next version may lead on from
        if initial is not None:
            self._follow(whole(initial, 0), 0)
            self.held = Held(0, sum_of(initial))

    def take(self, version: Version) -> Tensor:
        """Return the values of ``version`` [1, N], float32, not to be written to.

        Errors: ``PayloadError`` or ``DesyncError``; then nothing is held, and the next version comes whole.
        """
        try:
            row = self._values_of(version)
            wrong = f"version {version.number} differs from the server's; ask for all of it"
            require(sum_of(row) == version.check, DesyncError, wrong)
        except ThinwireError:
            self.drop()
            raise
        if version.form is not Form.FULL:
            self._row, self.held = row, version.held
        return row

    def drop(self) -> None:
        """Hold nothing."""
        self._receiver.reset()
        self._row = self.held = None

    def _values_of(self, version: Version) -> Tensor:
        if version.form is Form.FULL:
            return unpack_row(version.packets[0], self._values, SHARED)
        if version.form is Form.WHOLE:
            self.drop()
            return self._follow(version.packets[0], version.number)
        base = version.number - len(version.packets)
        if self.held is None or not base <= self.held.number <= version.number:
            held = "nothing" if self.held is None else f"version {self.held.number}"
            raise DesyncError(f"version {version.number} leads on from {base}, and {held} is held")
        row = self._row
        for number in range(self.held.number + 1, version.number + 1):
            row = self._follow(version.packets[number - base - 1], number)
        require(row is not None, PayloadError, f"version {version.number} holds nothing")
        return row  # type: ignore[return-value]  # as just required

    def _follow(self, data: bytes | memoryview, number: int) -> Tensor:
        """Decode a message of the shared model, the one that leads to version ``number``."""
        most = most_nbytes(self._values)
        require(len(data) <= most, PayloadError, f"version {number} takes {len(data)} bytes, over {most}")
        packet = wire.unpack(data, max_nbytes=4 * self._values)
        entries = [(e.key, e.version) for e in packet.entries]
        fits = packet.memory == repr(Delta()) and entries == [(SHARED, number + 1)]
        require(fits, PayloadError, f"what came for version {number} is no message of it")
        self._row = self._receiver.decode(packet, expect=TensorSpec((1, self._values), torch.float32))
        return self._row
