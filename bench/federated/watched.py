"""What clients hold back during a run, beside the threshold above which they send."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from unittest.mock import patch

from torch import Tensor

from thinwire.codecs import Codec, HardThreshold
from thinwire.rounds.parameters import unpack_row
from thinwire.rounds.residuals import ClientResiduals

Turn = list[float]  # number, threshold, root mean square of the residual


class Watch:
    """The residual of each client after each of its turns, rebuilt from its changes and its packets."""

    def __init__(self) -> None:
        self._residuals: dict[int, Tensor] = {}
        self._turns: dict[int, list[tuple[float, float]]] = {}

    def see(self, client: int, turn: int, change: Tensor, codec: Codec, packet: bytes) -> None:
        """Note what a turn left behind; codecs without a threshold leave no note."""
        if not isinstance(codec, HardThreshold):
            return
        whole = self._residuals.get(client, 0.0) + change
        left = whole - unpack_row(packet, change.numel(), client, change.device)
        self._residuals[client] = left
        rms = float(left.norm()) / math.sqrt(left.numel())
        self._turns.setdefault(turn, []).append((codec.threshold, rms))

    def points(self) -> list[Turn]:
        """Return the means over clients, by turn."""
        return [
            [float(turn), *(fmean(values) for values in zip(*seen, strict=True))]
            for turn, seen in sorted(self._turns.items())
        ]


@contextmanager
def watching() -> Iterator[Watch]:
    """Watch all clients of this process."""
    watch, encode = Watch(), ClientResiduals.encode

    def seen(self: ClientResiduals, client: int, sequence: int, change: Tensor, codec: Codec) -> bytes:
        before = change.clone()
        packet = encode(self, client, sequence, change, codec)
        watch.see(client, sequence, before, codec, packet)
        return packet

    with patch.object(ClientResiduals, "encode", seen):
        yield watch
