"""The fleets that come with thinwire, by name; the texts among them are device files, to copy from."""

from __future__ import annotations

import numpy as np

from thinwire.links.profile import Profile
from thinwire.types import InputError, require
from thinwire.uses.federated.run.fleet import Availability, Fleet, VirtualDevice

EQUAL, PHONES = "equal", "phones-1000"
SIZES = {EQUAL: 10, PHONES: 1000}  # devices, where nobody says how many
MOST = 100_000  # devices
PHONES_SEED = 1000
MBIT = 125e3  # bytes/s

# Ten devices of FedLuck's kind: uplinks that differ by three, one far slower, step times that differ by four,
# and slow links with slow processors, as in its released code [source].
# Rates are for a model of 47,000 values: a whole one takes a straggler 4 minutes, the others 25 to 75 s.
FLEETS = {
    "ten-one-straggler": """\
[[device]]
step_seconds = 0.4
link = "up=6kbit,down=24kbit,80ms"

[[device]]
count = 9
step_seconds = [0.3667, 0.1]
link = ["up=20kbit,down=80kbit,80ms", "up=60kbit,down=240kbit,80ms"]
"""
}


def equal(clients: int) -> Fleet:
    """Return devices that are alike: 0.1 s a step, 1 Mbit/s up and 4 down, 80 ms.

    >>> len(equal(3))
    3
    """
    require(1 <= clients <= MOST, InputError, f"{clients} clients; give 1 to {MOST}")
    device = VirtualDevice(0.1, Profile(up=MBIT, down=4 * MBIT, delay=0.08))
    return Fleet(EQUAL, (device,) * clients)


def phones(clients: int) -> Fleet:
    """Return the first of a thousand phones, drawn once and for all, evenly over the logarithms.

    0.5 to 10 Mbit/s up and four times that down, 50 ms; 0.05 to 1 s a step; there for 80 % of the time;
    5 % of their turns end without an update.
    """
    draws = np.random.default_rng(PHONES_SEED).random((SIZES[PHONES], 3))[:clients]
    return Fleet(PHONES, tuple(_phone(*map(float, draw)) for draw in draws))


def _phone(rate: float, speed: float, phase: float) -> VirtualDevice:
    up = 0.5 * MBIT * 20**rate
    link = Profile(up=up, down=4 * up, delay=0.05)
    return VirtualDevice(0.05 * 20**speed, link, Availability.share(0.8, phase), drop_out=0.05)
