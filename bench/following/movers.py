"""What is to be gained from who moved before, and what classes gain: bytes and times on recorded steps.

``python -m bench.following.movers`` (``make bench-movers``), given words (``coded``, ``ideal``, a rate) the
cells that have them. The steps are those of ``recording``; none was looked at while the coder was designed,
for which other steps were recorded, on WikiText-2 with another seed.

``coded``: publisher and follower with up to 4 classes, as before, and with 16, in turn on the same versions.
``ideal``: the code length of all differences where each context has its own code, the best for what it
holds; half the logarithm of its elements is added for each symbol of a context, which is what it costs to
learn it. Of every ``SHARE``-th element, times that. A context is the exponent of the old word and

- nothing more: what both ends know without a memory;
- the difference that the last version made;
- how many versions ago the weight last moved, and which way;
- a prediction: by how much it moved, as a value, in the last version, times 0.9, or the estimate of a Kalman
  filter over all versions. What is coded is then the difference from the predicted word, toward which it
  moves being positive.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.following.recording import Recording, Replay, in_process, scratch
from bench.study.cells import Kept, makers, run_study
from thinwire.state.history import History
from thinwire.state.layout import Array
from thinwire.state.patch_code import changes, classes
from thinwire.state.patches.patch import Patch
from thinwire.state.replica import Replica

STUDY = "movers"
KEPT = Kept(STUDY)
STEPS = {1e-6: 22, 1e-5: 48}  # of the recordings
VERSIONS = 22  # that are looked at, from the first on
SHARE = 8
FIRST, EVERY = 4, 6  # the versions whose ideal lengths are taken
BEFORE = {"MAX_CUTS": 4, "_PER_MEMBER": 0.3, "_MOST": 1 << 13}  # as the coder was
KEEPS, SURPRISE, SPREAD = 0.92, 0.15, 0.4  # of a move: what stays, what is new, its size, in learning rates
EDGES = np.array([1e-9, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1, 1.3, 1.7, 2.2, 3, 4, 6, 8,
                  12, 16, 32, 64])  # fmt: skip
AGES, LEAST, SIZES, SYMBOLS = 16, 80, 64, 256  # the oldest age, the smallest exponent that is told apart
Cell = tuple[str, float]


def cells() -> Iterator[Cell]:
    """Yield what is measured, and at which learning rate."""
    yield from ((kind, rate) for kind in ("coded", "ideal") for rate in STEPS)


def measure(cell: Cell) -> dict[str, Any]:
    """Record the steps of a cell, unless they are there, and return what it finds."""
    kind, rate = cell
    in_process(scratch(), rate, STEPS[rate])
    recording = Recording(scratch(), rate, STEPS[rate])
    return coded(recording) if kind == "coded" else ideal(recording, rate)


@contextmanager
def as_before() -> Iterator[None]:
    """Code with as few classes as before."""
    now = {name: getattr(classes, name) for name in BEFORE}
    _set(BEFORE)
    try:
        yield
    finally:
        _set(now)


def _set(limits: dict[str, Any]) -> None:
    for name, value in limits.items():
        setattr(classes, name, value)
    changes.MAX_CUTS = limits["MAX_CUTS"]


class Ends:
    """A publisher and a follower of the recorded state."""

    def __init__(self, replay: Replay) -> None:
        self._replay, layout = replay, replay.recording.layout
        self._history, self._replica = History(layout), Replica(layout)
        self._history.publish(replay.tensors)
        self._replica.apply(Patch.unpack(self._history.patch().pack()))
        self._replica.swap()

    def send(self) -> dict[str, float]:
        """Return bytes, and processor seconds at both ends, of one version."""
        base, clock = self._history.newest.number, time.process_time
        began = clock()
        self._history.publish(self._replay.tensors)
        packed = self._history.patch(base).pack()
        encoded = clock()
        self._replica.apply(Patch.unpack(packed))
        applied = clock()
        self._replica.swap()
        self._replica.prepare()
        self._replica.check()
        return {"bytes": len(packed), "encode": encoded - began, "decode": applied - encoded}


def coded(recording: Recording) -> dict[str, Any]:
    """Return what each version takes with few classes and with many."""
    replay, rows = Replay(recording), list[dict[str, Any]]()
    few, many = Ends(replay), Ends(replay)
    for step in range(1, VERSIONS + 1):
        replay.advance(1)
        with as_before():
            before = few.send()
        rows.append({"step": step, "before": before, "now": many.send()})
    return {"versions": rows}


def ideal(recording: Recording, rate: float) -> dict[str, Any]:
    """Return the bytes of some versions in each context."""
    found = [recording.change(step) for step in range(1, VERSIONS + 1)]
    found = [(at[at % SHARE == 0] // SHARE, flips[at % SHARE == 0]) for at, flips in found]
    start = recording.base[::SHARE]
    ever = np.unique(np.concatenate([at for at, _ in found]))
    still = np.bincount(_exponents(np.delete(start, ever)), minlength=256)
    words, memory, rows = start[ever], Memory(ever.size, rate), list[dict[str, Any]]()
    for step, (at, flips) in enumerate(found, 1):
        new = words.copy()
        new[np.searchsorted(ever, at)] ^= flips
        if step >= FIRST and (step - FIRST) % EVERY == 0:
            sizes = {name: SHARE * bits / 8 for name, bits in lengths(words, new, memory, still)}
            rows.append({"step": step, "bytes": sizes})
        memory.note(words, new)
        words = new
    return {"versions": rows}


class Memory:
    """What both ends may know of ``n`` weights from the versions before."""

    def __init__(self, n: int, rate: float) -> None:
        self.last, self.way = np.zeros(n, np.int64), np.zeros(n, np.int64)  # difference, direction of a move
        self.age = np.full(n, AGES - 1)
        self.moved, self.filtered = np.zeros(n), np.zeros(n)
        self._gains = _gains(rate)

    def note(self, words: Array, new: Array) -> None:
        """Take a version into account."""
        self.last = new.astype(np.int64) - words
        some = self.last != 0
        self.age = np.where(some, 0, np.minimum(self.age + 1, AGES - 1))
        self.way = np.where(some, np.sign(self.last), self.way)
        self.moved = _values(new) - _values(words)
        surprise = self._gains[_exponents(words)] * (self.moved - self.filtered)
        self.filtered = KEEPS * (self.filtered + surprise)


def _gains(rate: float) -> Array:
    """Return how much a filter trusts what a weight of each exponent was seen to move [256]."""
    noise, new = _steps(np.arange(256)) ** 2 / 6, (SURPRISE * rate) ** 2
    spread = np.full(256, (SPREAD * rate) ** 2)
    for _ in range(300):
        spread = KEEPS**2 * spread * noise / (spread + noise) + new
    gains: Array = spread / (spread + noise)
    return gains


def lengths(words: Array, new: Array, memory: Memory, still: Array) -> Iterator[tuple[str, float]]:
    """Yield the name of each context and the bits of a version in it."""
    diffs = (new.astype(np.int64) - words + 32768 & 65535) - 32768
    exponents = _exponents(words)
    none = np.zeros(words.size, np.int64)
    old = memory.age + AGES * (memory.way + 1)
    count: Callable[..., float] = lambda *about: _bits(exponents, still, *about)  # noqa: E731
    yield "one code", _bits(none, np.bincount([0], [still.sum()], 256), none, 0, diffs)
    yield "exponent", count(none, 0, diffs)
    yield "exponent, last difference", count(np.clip(memory.last, -3, 3) + 3, 3, diffs)
    yield "exponent, age, direction", count(old, AGES - 1 + AGES, diffs)
    for name, by in (("last version", 0.9 * memory.moved), ("versions before", memory.filtered)):
        rest, sizes, ways = predicted(words, new, diffs, by)
        yield f"prediction from the {name}", count(sizes, 0, rest)
        turned = memory.age + AGES * (memory.way * ways + 1)
        both = sizes + (EDGES.size + 1) * turned
        never = (EDGES.size + 1) * (AGES - 1 + AGES)
        yield f"prediction from the {name}, age, direction", count(both, never, rest)


def predicted(words: Array, new: Array, diffs: Array, by: Array) -> tuple[Array, Array, Array]:
    """Return what is left of differences where moves ``by`` were foreseen, their sizes and ways."""
    old = _values(words)
    likely = _words(old + by)
    rest = np.where(likely == words, diffs, (new.astype(np.int64) - likely + 32768 & 65535) - 32768)
    ways = np.where((by * old < 0), -1, 1)
    return rest * ways, np.searchsorted(EDGES, np.abs(by) / _steps(_exponents(words))), ways


def _bits(exponents: Array, still: Array, contexts: Array, never: int, diffs: Array) -> float:
    """Return the bits of ``diffs`` by exponent and context; ``still`` weights never moved, by exponent."""
    sizes = np.abs(diffs)
    octaves = np.frexp(sizes.astype(np.float64))[1].astype(np.int64)
    plain = sizes < 16
    kinds = np.where(plain, sizes, 8 * (octaves - 3) + (sizes >> np.maximum(octaves - 4, 0) & 7))
    symbols = np.where(diffs < 0, 2 * kinds - 1, 2 * kinds)
    raw = float(np.where(plain, 0, octaves - 4).sum())
    places = contexts * SIZES + np.clip(exponents - LEAST, 0, SIZES - 1)
    many = max(int(contexts.max()), never) + 1
    table = np.bincount(places * SYMBOLS + symbols, minlength=many * SIZES * SYMBOLS).astype(np.float64)
    table = table.reshape(-1, SYMBOLS)
    np.add.at(table[:, 0], never * SIZES + np.clip(np.arange(256) - LEAST, 0, SIZES - 1), still)
    table = table[table.any(1)]
    total, used = table.sum(1), (table > 0).sum(1)
    learnt = float(((used - 1) / 2 * np.log2(np.maximum(total, 2))).sum())
    return raw + learnt + float(_weighed(total).sum() - _weighed(table).sum())


def _weighed(counts: Array) -> Array:
    weighed: Array = counts * np.log2(np.maximum(counts, 1))
    return weighed


def _exponents(words: Array) -> Array:
    found: Array = (words.view(np.uint16) >> 7 & 255).astype(np.int64)
    return found


def _steps(exponents: Array) -> Array:
    """Return the spacing of bf16 values of these exponents."""
    steps: Array = np.exp2(np.maximum(exponents, 1) - 134.0)
    return steps


def _values(words: Array) -> Array:
    return (words.astype(np.int32) << 16).view(np.float32).astype(np.float64)


def _words(values: Array) -> Array:
    """Return the nearest bf16 words."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16).view(np.int16)


def summary() -> dict[str, Any]:
    """Return the means over the versions of each finished cell."""
    known = [(cell, found) for cell in cells() if (found := KEPT.get(cell))]
    rows: dict[str, list[dict[str, Any]]] = {"coded": [], "ideal": []}
    for (kind, rate), found in known:
        mean = _coded_mean if kind == "coded" else _ideal_mean
        rows[kind].append({"rate": rate, "versions": len(found["versions"])} | mean(found["versions"]))
    return {"made_by": makers(found for _, found in known), **rows}


def _coded_mean(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ways = {
        way: {"bytes": statistics.fmean(r[way]["bytes"] for r in rows)}
        | {k: statistics.median(r[way][k] for r in rows) for k in ("encode", "decode")}
        for way in ("before", "now")
    }
    before, now = ways["before"], ways["now"]
    gain = {"fewer": before["bytes"] / now["bytes"]}
    slower = {f"{k}_slower": now[k] / before[k] for k in ("encode", "decode")}
    return ways | gain | slower


def _ideal_mean(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = rows[0]["bytes"]
    return {"bytes": {name: statistics.fmean(r["bytes"][name] for r in rows) for name in names}}


if __name__ == "__main__":
    run_study(STUDY, sys.argv[1:], cells, measure, summary)
