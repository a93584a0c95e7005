"""The most memory that each end of each way takes, for ``sync_hosts``: a process of its own for each.

What the interpreter and its libraries hold, and what replaying needs, is left out: the peak is set back after
each step. The weights themselves count, once at the sender, and as often as they are held at the receiver.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from bench.following.hosts.host_coding import OURS, PlainSender, Sender, Taker
from bench.following.hosts.host_formats import host_formats
from bench.following.hosts.host_sources import Moving
from thinwire.runs.machine.processor import resident_peak
from thinwire.runs.records.writer import read_json, write_json
from thinwire.types import MeasurementError

STEPS = 3
Make = Callable[[], Moving]


def memory(make: Make, ways: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return the peak of both ends of each way in bytes; ``make`` begins with the weights."""
    torch.set_num_threads(1)  # no threads: what follows are forks, since each would load its libraries anew
    return {way: _both(make, way) for way in ways}


def _both(make: Make, way: str) -> dict[str, int]:
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for end, run in (("encode", sending), ("decode", taking)):
            process = multiprocessing.get_context("fork").Process(
                target=one_end, args=(run, make, way, Path(name))
            )
            process.start()
            process.join()
            if process.exitcode:
                raise MeasurementError(f"{way}: {end} ended with {process.exitcode}")
            found[end] = int(read_json(Path(name) / "peak.json"))
    return found


def one_end(run: Callable[[Make, str, Path], Iterator[int]], make: Make, way: str, place: Path) -> None:
    """Be one end, and write its peak in bytes."""
    before = reset()
    write_json(place / "peak.json", max(run(make, way, place)) - before)


def reset() -> int:
    """Let the peak begin anew, and return it: what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    if not (now := resident_peak(os.getpid())):
        raise MeasurementError("this machine does not tell the peak of a process")
    return now


def sending(make: Make, way: str, place: Path) -> Iterator[int]:
    """Write what travels into files, and yield the peak of each version."""
    source = make()
    words = source.words.copy() if way != OURS else np.empty(0, np.int16)
    other = host_formats(source.layout).get(way)
    sender = Sender(source) if other is None else PlainSender(source, other, words)
    for number in range(STEPS):
        source.advance()
        reset()
        parts = sender.encode()
        yield resident_peak(os.getpid())
        if other is not None:
            np.copyto(words, source.words)
        np.savez(place / f"{number}.npz", *(np.frombuffer(p, np.uint8) for p in parts))


def taking(make: Make, way: str, place: Path) -> Iterator[int]:
    """Bring the weights forward by those files, and yield the peak of each version."""
    source = make()
    take: Callable[[list[bytes]], None]
    if way == OURS:
        taker = Taker(source)
        take = taker.decode
        del source, make  # a model's weights are the follower's copy from here on
    else:
        other, held = host_formats(source.layout)[way], source.words

        def take(parts: list[bytes]) -> None:
            other.decode(parts, held)

    for number in range(STEPS):
        with np.load(place / f"{number}.npz") as kept:
            parts = [kept[name].tobytes() for name in kept.files]
        reset()
        take(parts)
        yield resident_peak(os.getpid())
