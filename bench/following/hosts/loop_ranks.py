"""The two processes of ``host_loop``: a trainer that replays a recording, and a worker that generates.

``python -m bench.following.hosts.loop_ranks publish|follow``; the order comes as JSON in ``THINWIRE_BENCH``.
Prompts and samples go by thinwire's pool and worker either way; only the weights' way differs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from bench.following.hosts.host_coding import OURS
from bench.following.hosts.host_sources import Moving, moving, views
from bench.following.hosts.plain_stream import PlainFollower, PlainPublisher
from bench.following.recording import MODEL
from thinwire.runs.models.model_source import resolve_model
from thinwire.runs.records.writer import write_json
from thinwire.types import ThinwireError
from thinwire.uses.following.follower_base import Applied
from thinwire.uses.following.hosts.rollout_pool import RolloutPool
from thinwire.uses.following.hosts.rollout_worker import Generate, RolloutWorker, transformers_generate
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.run.demo_ranks import base_model

PORT, POOL = 29620, 29621
PATIENCE = 240.0  # seconds


class Changes:
    """The changes of a recording's first steps, in memory: what training makes, without the training."""

    def __init__(self, source: Moving, steps: int) -> None:
        self.source = source
        self._known = [source.flips(step) for step in range(1, steps + 1)]

    def train(self, step: int, seconds: float) -> None:
        """Make a step (from 1), which lasts so many seconds."""
        began = time.monotonic()
        at, bits = self._known[step - 1]
        self.source.words[at] ^= bits
        time.sleep(max(0.0, began + seconds - time.monotonic()))


class Sending(ABC):
    """The trainer's way to send weights."""

    @abstractmethod
    def publish(self) -> int:
        """Make the weights the newest version, and return its number."""

    @abstractmethod
    def close(self) -> None:
        """End it, once all is sent."""


class OursSending(Sending):
    """By thinwire."""

    def __init__(self, source: Moving, order: dict[str, Any]) -> None:
        token = bytes.fromhex(order["token"])
        self._publisher = Publisher(source.tensors, order["host"], order["port"], token, "loop")

    def publish(self) -> int:
        return self._publisher.publish().number

    def close(self) -> None:
        self._publisher.close(PATIENCE)


class PlainSending(Sending):
    """By another way's bytes in a TCP stream."""

    def __init__(self, source: Moving, order: dict[str, Any]) -> None:
        self._publisher = PlainPublisher(source, order["way"], order["host"], order["port"])

    def publish(self) -> int:
        return self._publisher.publish()

    def close(self) -> None:
        self._publisher.close()


def trainer(order: dict[str, Any]) -> dict[str, Any]:
    """Let workers generate, train, publish, again and again; return what each step took."""
    source = moving(order["kind"], Path(order["folder"]), order["recorded"])
    changes = Changes(source, order["warm"] + order["steps"])
    token = bytes.fromhex(order["token"])
    sending = (OursSending if order["way"] == OURS else PlainSending)(source, order)
    pool = RolloutPool(order["host"], order["pool"], token, order["max_age"], PATIENCE)
    settings = {"do_sample": False, "max_new_tokens": order["tokens"], "min_new_tokens": order["tokens"]}
    version, rows, began = sending.publish(), [], 0.0
    try:
        for step in range(1, order["warm"] + order["steps"] + 1):
            if step == order["warm"] + 1:
                Path(order["ready"]).touch()  # the network's counters are read now
                pool.ages.clear()
                began = time.monotonic()
            asked = time.monotonic()
            samples = pool.generate(order["prompts"], version, settings)
            made = time.monotonic()
            changes.train(step, order["pace"])
            trained = time.monotonic()
            version = sending.publish()
            rows.append({"generated": made - asked, "published": time.monotonic() - trained,
                         "tokens": sum(len(s.tokens) for s in samples)})  # fmt: skip
        seconds = time.monotonic() - began
    finally:
        pool.close()
    sending.close()
    return {"rows": rows[order["warm"] :], "seconds": seconds, "ages": pool.rows(),
            "version": version, "words": checksum(source.words)}  # fmt: skip


def checksum(words: np.ndarray) -> int:
    """Return a check sum of words [n]."""
    return int(np.bitwise_xor.reduce(words.astype(np.int64) * (np.arange(words.size) % 65_521 + 1)))


class Following:
    """The worker's way to take weights: whom it waits for, and what brings the model forward."""

    def __init__(self, order: dict[str, Any], model: nn.Module, source: Moving) -> None:
        self.follower: Follower | PlainFollower
        self.bring_up: Callable[[], Applied]
        self.held: Callable[[], np.ndarray]
        if order["way"] == OURS:
            token = bytes.fromhex(order["token"])
            follower = Follower(order["host"], order["port"], token, into=model)
            self.follower, self.bring_up = follower, lambda: follower.apply_to(model)
            self.held = lambda: joined(follower)
        else:
            own = views(source.layout, source.words)
            for name, x in model.named_parameters():
                x.data = own[name]
            plain = PlainFollower(source, order["way"], order["host"], order["port"])
            self.follower, self.bring_up, self.held = plain, plain.bring_up, lambda: source.words


def joined(follower: Follower) -> np.ndarray:
    """Return the words [n] of what is followed."""
    tensors = follower.tensors()
    return np.concatenate([x.view(torch.int16).reshape(-1).numpy() for x in tensors.values()])


def worker(order: dict[str, Any], model: nn.Module, generate: Generate) -> dict[str, Any]:
    """Generate until the trainer is done; return the check sum of the weights at the end."""
    source = moving(order["kind"], Path(order["folder"]), order["recorded"])
    way = Following(order, model, source)
    token, stop = bytes.fromhex(order["token"]), threading.Event()
    own = RolloutWorker(
        cast(Follower, way.follower), way.bring_up, generate, order["host"], order["pool"], token, PATIENCE
    )
    thread = threading.Thread(target=own.serve, args=(stop,), name="generates")
    thread.start()
    try:
        last = way.follower.wait(1 + order["warm"] + order["steps"], PATIENCE)
    finally:
        stop.set()
        thread.join(PATIENCE)
    while way.bring_up().version.number < last.number:
        time.sleep(0.01)
    found = {"version": last.number, "words": checksum(way.held())}
    way.follower.close()
    return found


def main() -> None:
    """Do what is ordered and write what came of it."""
    order = json.loads(os.environ["THINWIRE_BENCH"])
    torch.set_num_threads(1)
    try:
        if sys.argv[1] == "publish":
            found = trainer(order)
        else:
            model = base_model(resolve_model(MODEL, None), torch.bfloat16)
            found = worker(order, model, transformers_generate(model))
    except (ThinwireError, OSError) as e:
        print(f"{sys.argv[1]}: {e}", file=sys.stderr, flush=True)
        os._exit(1)  # whatever other threads wait for
    write_json(Path(order["out"]), found)
    os._exit(0)


if __name__ == "__main__":
    main()
