"""The processes of ``links``: a publisher that replays a recording, and those who follow it.

``python -m bench.following.worker publish|follow``; the order comes as JSON in ``THINWIRE_BENCH``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.following.recording import Recording
from thinwire.runs.records.writer import write_json
from thinwire.state.patches.draft import Draft, More
from thinwire.state.patches.moves import Reading
from thinwire.state.patches.patch import Patch
from thinwire.types import ThinwireError
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.protocol import Message
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.push.reception import PartialPatch
from thinwire.uses.following.push.state_relay import StateRelay

PORT = 29600
PATIENCE = 240.0  # seconds
Change = tuple[np.ndarray, np.ndarray]


class Weights(nn.Module):
    """Tensors under names that a module could not have; a follower's model."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._own = tensors

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        """Yield the tensors."""
        return iter(self._own.items())

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the tensors."""
        return dict(self._own)


def round_and_round(changes: list[Change]) -> Iterator[Change]:
    """Yield the changes again and again: the second time the same bits flip back, so it begins anew.

    Forwards and backwards in turn would make patches of nothing around each turn. Two whole rounds cancel, so
    whoever merges many versions takes each change once, of a longer recording.
    """
    while True:
        yield from changes


def strides(recording: Recording, stride: int) -> list[Change]:
    """Return the changes of every ``stride`` steps, in memory: some 12 GB of 192 steps at 5e-5."""
    found = []
    for start in range(0, recording.steps - stride + 1, stride):
        flips = np.zeros(recording.layout.numel, np.int16) if stride > 1 else None
        for step in range(start + 1, start + stride + 1):
            at, bits = recording.change(step)
            if flips is not None:
                flips[at] ^= bits
        if flips is not None:
            at = np.flatnonzero(flips).astype(np.int32)
            bits = flips[at]
        found.append((at, bits))
    return found


def base(recording: Recording) -> tuple[np.ndarray, dict[str, Tensor]]:
    """Return the words of the base and tensors that share their memory."""
    words = recording.base
    return words, recording.views(torch.from_numpy(words).view(torch.bfloat16))


class Publishing:
    """The publisher's process: versions at a steady pace for a while, and what each cost."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        recording = Recording(Path(order["folder"]), order["rate"], order["steps"])
        self._words, tensors = base(recording)
        self._changes = strides(recording, order["stride"])
        token = bytes.fromhex(order["token"])
        self._publisher = Publisher(tensors, order["host"], PORT, token, "bench", torch.bfloat16)
        self._rows: list[dict[str, Any]] = []
        self._patches: list[dict[str, Any]] = []
        self._watch_coding()

    def _watch_coding(self) -> None:
        history, make = self._publisher.history, self._publisher.history.patch

        def watched(base: int | None = None, mark: bool = True, more: More = lambda draft: None) -> Patch:
            began, sections = time.perf_counter(), list[float]()

            def told(draft: Draft) -> None:
                sections.append(time.perf_counter() - began)
                more(draft)

            found = make(base, mark, told)
            self._patches.append({"base": found.base, "version": found.version, "bytes": len(found.body),
                                  "seconds": time.perf_counter() - began,
                                  "lead": sections[0] if sections else None})  # fmt: skip
            return found

        history.patch = watched  # type: ignore[method-assign]

    def run(self) -> dict[str, Any]:
        """Wait for the followers, publish, wait until all have the last version."""
        self._publish(0)
        self._wait(1)
        sent = self._publisher.sent
        Path(self._order["ready"]).touch()  # the network's counters are read now
        time.sleep(1.0)
        end = time.monotonic() + self._order["seconds"]
        due = time.monotonic()
        once, known = self._order["once"], self._changes
        changes, most = (known, len(known)) if once else (round_and_round(known), math.inf)
        for number, (at, flips) in enumerate(changes, 1):
            self._words[at] ^= flips
            due = max(due + self._order["interval"], time.monotonic() - self._order["interval"])
            time.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() >= end or number == most:
                self._publish(number, last=1)
                break
            self._publish(number)
        self._wait(self._publisher.newest.number)
        Path(self._order["done"]).touch()
        followers = [asdict(f) for f in self._publisher.followers]
        return {"versions": self._rows, "patches": self._patches, "sent_first": sent,
                "sent": self._publisher.sent, "followers": followers,
                "hash": f"{self._publisher.newest.hash:016x}"}  # fmt: skip

    def _publish(self, step: int, **meta: int) -> None:
        began = time.perf_counter()
        v = self._publisher.publish(step=step, **meta)
        self._rows.append({"version": v.number, "published": v.published, "changed": v.changed,
                           "seconds": time.perf_counter() - began})  # fmt: skip

    def _wait(self, version: int) -> None:
        end = time.monotonic() + PATIENCE
        wanted = self._order["followers"]
        while time.monotonic() < end:
            there = [f for f in self._publisher.followers if f.version >= version]
            if len(there) >= wanted:
                return
            time.sleep(0.05)
        raise SystemExit(f"not all of {wanted} followers came to version {version}")


class Following:
    """One follower that uses each version as soon as it may, and what it saw."""

    def __init__(self, host: str, port: int, order: dict[str, Any]) -> None:
        token = bytes.fromhex(order["token"])
        model = None
        if order["base"]:
            _, tensors = base(Recording(Path(order["folder"]), order["rate"], order["steps"]))
            model = Weights(tensors)
        self._follower = Follower(host, port, token, into=model)
        self._model = model
        self.error: ThinwireError | None = None
        self._pauses: list[float] = []
        self._applied: dict[int, float] = {}
        self._watch_applying()
        self.thread = threading.Thread(target=self._use, name="uses what comes")
        self.thread.start()

    def _watch_applying(self) -> None:
        reception = self._follower._reception
        apply = reception._apply

        def watched(partial: PartialPatch, reading: Reading | None) -> Message:
            answer = apply(partial, reading)
            self._applied[partial.begin.version] = time.monotonic() - partial.came
            return answer

        reception._apply = watched  # type: ignore[method-assign]

    def _use(self) -> None:
        try:
            self._take_all()
        except ThinwireError as e:
            self.error = e

    def _take_all(self) -> None:
        for version in self._follower:
            if self._model is not None:
                self._follower.apply_to(self._model)
                self._pauses.append(self._follower.replica.pause)
            else:
                self._follower.tensors()
            if version.meta.get("last"):
                break
        while self._follower.replica.version < version.number:  # busy applying, for a moment
            self._follower.tensors()
        self._follower.replica.check()

    def result(self) -> dict[str, Any]:
        """Return what came; call it once the thread has ended."""
        rows = [asdict(a) | {"apply": self._applied.get(a.version)} for a in self._follower.arrivals]
        found = {"arrivals": rows, "pauses": self._pauses, "status": asdict(self._follower.status),
                 "hash": f"{self._follower.replica.hash:016x}"}  # fmt: skip
        self._follower.close()
        return found


def follow(order: dict[str, Any]) -> dict[str, Any]:
    """Run the followers of one machine, behind a relay where one is asked for."""
    host, port, relay = order["host"], PORT, None
    if order["relay"]:
        relay = StateRelay(host, port, ("127.0.0.1", 0), bytes.fromhex(order["token"]))
        relay.wait(1, PATIENCE)
        host, port = "127.0.0.1", relay.port
    followers = [Following(host, port, order) for _ in range(order["count"])]
    for f in followers:
        f.thread.join()
        if f.error is not None:
            raise SystemExit(str(f.error))
    end = time.monotonic() + PATIENCE
    while not Path(order["done"]).exists() and time.monotonic() < end:  # the publisher counts who is there
        time.sleep(0.05)
    found = [f.result() for f in followers]
    if relay is not None:
        relay.close()
    return {"followers": found}


def main() -> None:
    """Do what is ordered and write what came of it."""
    order = json.loads(os.environ["THINWIRE_BENCH"])
    torch.set_num_threads(1)
    try:
        found = Publishing(order).run() if sys.argv[1] == "publish" else follow(order)
    except (ThinwireError, SystemExit) as e:
        print(f"{sys.argv[1]}: {e}", file=sys.stderr, flush=True)
        os._exit(1)  # whatever other threads wait for
    write_json(Path(order["out"]), found)
    os._exit(0)


if __name__ == "__main__":
    main()
