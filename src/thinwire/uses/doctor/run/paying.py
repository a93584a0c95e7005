"""Whether compression would pay on a link: what it saves there against what coding takes on this machine."""

from __future__ import annotations

from time import perf_counter

import torch

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.memory import ErrorFeedback
from thinwire.codecs import DeadZone, Entropy
from thinwire.codecs.deadzone import step_for

VALUES = 1 << 20
TRIES = 3
BITS = 1.2
MEGABIT = 125e3  # bytes


def coding_seconds() -> float:
    """Return the seconds that this machine takes to encode and decode a million values, at its best."""
    sender, receiver = Sender(Scheme(Entropy(DeadZone(step_for(BITS))), ErrorFeedback())), Receiver()
    x = torch.randn(1, VALUES, generator=torch.Generator().manual_seed(0))
    best = float("inf")
    for _ in range(TRIES):
        start = perf_counter()
        receiver.decode(wire.unpack(wire.pack(sender.encode(x, [0])[0])))
        best = min(best, perf_counter() - start)
    return 1e6 * best / VALUES


def pays(rate: float, coding: float) -> str:
    """Say in one sentence whether coded exchanges are quicker than plain ones on a link of ``rate`` bytes/s.

    ``coding``: seconds for a million values.

    >>> pays(5e6, 0.004)
    'compression pays here: a million fp32 values take 0.8 s on this link, coded ones 0.034 s'
    >>> pays(5e7, 0.06)
    'compression pays little here: a million fp32 values take 0.08 s on this link, coded ones 0.063 s'
    """
    plain, coded = 4e6 / rate, BITS / 8 * 1e6 / rate + coding
    values = f"a million fp32 values take {plain:.2g} s on this link, coded ones {coded:.2g} s"
    if coded < plain / 2:
        return f"compression pays here: {values}"
    if coded < plain:
        return f"compression pays little here: {values}"
    limit = (4e6 - BITS / 8 * 1e6) / coding / MEGABIT
    return f"compression would not pay here: {values}; on this machine it does below {limit:.0f} Mbit/s"
