"""Make the traces that thinwire ships: links of real kinds, drawn from stated facts with a fixed seed.

Run ``python -m bench.ground.traces``: writes ``src/thinwire/links/traces/*.csv``, the same bytes every time.
The traces are synthetic; no link was recorded. What is known of such links, and from where, is in ``KINDS``
and at the head of each file; the ranges are chosen to fit. Facts marked [memory] were not looked up again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from thinwire.links.trace import COLUMNS

FOLDER = Path(__file__).parents[2] / "src" / "thinwire" / "links" / "traces"
State = tuple[float, float, float, float]  # up and down [Mbit/s], one-way delay [ms], loss [%]


class Walk:
    """A value that wanders by factors between two limits, and is drawn back to its middle."""

    def __init__(
        self, rng: Random, low: float, middle: float, high: float, pull: float, noise: float
    ) -> None:
        self._rng, self._low, self._middle, self._high = rng, low, middle, high
        self._pull, self._noise, self.value = pull, noise, middle

    def step(self) -> float:
        """Move on by one row, and return where it is."""
        drift = self._pull * math.log(self._middle / self.value)
        moved = self.value * math.exp(drift + self._noise * _normal(self._rng))
        self.value = min(max(moved, self._low), self._high)
        return self.value


def _normal(rng: Random) -> float:
    """Draw nearly normally, from random() alone: its sequence stays the same in later Pythons."""
    return sum(rng.random() for _ in range(12)) - 6


def _spells(rng: Random, chance: float, shortest: int, longest: int) -> Iterator[float]:
    """Yield how deep in a spell (a fade, a burst) each row is: 0 outside, up to 1 in its middle."""
    while True:
        if rng.random() >= chance:
            yield 0.0
            continue
        rows = shortest + int(rng.random() * (longest - shortest + 1))
        yield from (math.sin(math.pi * (i + 1) / (rows + 1)) for i in range(rows))


def home_uplink(rng: Random) -> Iterator[State]:
    """Draw a cable line in the evening: neighbours share it, another upload fills the modem's buffer."""
    up, down = Walk(rng, 10, 24, 40, 0.1, 0.08), Walk(rng, 80, 180, 250, 0.1, 0.06)
    uploads = _spells(rng, 0.06, 4, 10)
    while True:
        busy = next(uploads)
        yield max(10.0, up.step() * (1 - 0.5 * busy)), down.step(), 12 + 110 * busy, 0.0


def lte(rng: Random) -> Iterator[State]:
    """Draw a phone in a moving car: the radio's rate wanders, and fades at the edge of a cell."""
    up, down = Walk(rng, 2, 9, 30, 0.06, 0.16), Walk(rng, 2, 22, 60, 0.06, 0.16)
    delay, fades = Walk(rng, 35, 45, 70, 0.2, 0.08), _spells(rng, 0.03, 4, 12)
    while True:
        fade = next(fades)
        keep = 1 - 0.85 * fade
        late = min(80.0, delay.step() + 25 * fade)
        yield max(2.0, up.step() * keep), max(2.0, down.step() * keep), late, 0.0


def satellite(rng: Random) -> Iterator[State]:
    """Draw a geostationary link: far, steady, and in rain coded more strongly and so slower."""
    up, down = Walk(rng, 5, 8, 10, 0.2, 0.03), Walk(rng, 12, 18, 20, 0.2, 0.03)
    rain = _spells(rng, 0.03, 15, 30)
    while True:
        fade = next(rain)
        keep = 1 - 0.7 * fade
        yield max(2.0, up.step() * keep), max(5.0, down.step() * keep), 280, 0.05 * fade


def campus_busy(rng: Random) -> Iterator[State]:
    """Draw a shared wireless network: fast, with short spells when everyone is on the air."""
    rate, crowds = Walk(rng, 100, 300, 500, 0.15, 0.15), _spells(rng, 0.05, 3, 8)
    while True:
        crowd = next(crowds)
        now = max(20.0, rate.step() * (1 - 0.95 * crowd))
        yield now, now, 4 + 20 * crowd, 0.0


def drop(rng: Random) -> Iterator[State]:
    """Drop from fast to slow for a third of the time; nothing is drawn."""
    yield from ((500, 500, 10, 0), (20, 20, 10, 0), (500, 500, 10, 0))


@dataclass(frozen=True)
class Kind:
    """How one file is made: what draws it, how many rows of how many seconds, from which facts."""

    make: Callable[[Random], Iterator[State]]
    rows: int
    step: float  # seconds
    seed: int
    facts: str


KINDS = {
    "home-uplink": Kind(home_uplink, rows=120, step=1.0, seed=1, facts="""\
A home's cable line in the evening: 10 to 40 Mbit/s up, 80 to 250 Mbit/s down.
- Cable plans send a tenth to a fifth as fast as they receive. [memory]
- A modem without queue management adds about 250 ms when an upload fills its buffer, one with it 15 to 30 ms.
  [quoted: abstract of arXiv:2107.13968, Comcast, 2021]
Another upload in the home comes and goes: it takes up to half of the uplink and adds up to 220 ms to the
round trip. A trace's delay holds both ways, so each way gets half. A bloated buffer for one's own traffic:
trace:home-uplink,queue=750kB, which is 250 ms at 24 Mbit/s."""),
    "lte": Kind(lte, rows=240, step=0.5, seed=2, facts="""\
A phone's LTE link in a moving car: 2 to 60 Mbit/s down, 2 to 30 Mbit/s up, 35 to 80 ms one way.
- Typical downlinks are 10 to 20 Mbit/s, peaks above 40. [second-hand: a press test of US carriers, 2013]
- Uplinks have about half the rate; round trips are near 70 ms, more under load. [memory]
- The radio layer sends again what it loses, so losses show as delay and lower rate. [memory]
Rates are random walks in the logarithm; fades of 2 to 6 s take up to 85 % of the rate."""),
    "satellite": Kind(satellite, rows=120, step=1.0, seed=3, facts="""\
A geostationary satellite: 280 ms one way, 5 to 20 Mbit/s down, 2 to 10 Mbit/s up.
- 35786 km high: up and down again is 239 ms of light. [derived] Round trips are about 600 ms.
  [second-hand: a university's page on satellite links]
- In rain the modem changes to a stronger code, which lowers the rate; some loss remains. [memory]
Rain fades of 15 to 30 s, much shortened so that two minutes hold some, take up to 70 % of the rate."""),
    "campus-busy": Kind(campus_busy, rows=120, step=1.0, seed=4, facts="""\
A busy campus's wireless network: 100 to 500 Mbit/s both ways, with dips to 20 Mbit/s, 4 to 24 ms one way.
- 66 % of a university's classes had a second or more of very high channel use; in all, 0.13 % of class time.
  [quoted: abstract of Hales, Performance Analysis of University WiFi, thesis, BYU, 2025]
- Rates of hundreds of Mbit/s are usual for one client on a free channel. [memory]
Dips of 3 to 8 s, far more often than measured: the trace is of the busy quarter of an hour."""),
    "drop": Kind(drop, rows=3, step=20.0, seed=0, facts="""\
A test, not a kind of link: 500 Mbit/s, then 20 Mbit/s for 20 s, then back; 10 ms one way."""),
}  # fmt: skip


def text(name: str) -> str:
    """Return a trace file's whole text."""
    kind = KINDS[name]
    states = kind.make(Random(kind.seed))
    head = [
        "Synthetic: made by python -m bench.ground.traces; no link was recorded.",
        *kind.facts.split("\n"),
    ]
    lines = [f"# {line}" for line in head] + [",".join(COLUMNS)]
    for i in range(kind.rows):
        values = (i * kind.step, *next(states))
        lines.append(",".join(f"{value:.4g}" for value in values))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in KINDS:
        (FOLDER / f"{name}.csv").write_text(text(name))
