"""The processes that ``state_demo`` starts: one trains and publishes, the others follow."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.engines.sync.push.follower import Follower
from thinwire.engines.sync.push.publisher import Publisher
from thinwire.lab.following.gate import Gate
from thinwire.lab.following.job import Tuning, base_model, digest, weights_of, write_on
from thinwire.lab.following.talk import Orders, run_worker, say
from thinwire.lab.models.source import resolve_model

PATIENCE = 300.0  # seconds
EVERY = 0.5  # seconds between two reports


def train(order: Mapping[str, Any], orders: Orders) -> None:
    """Fine-tune at each rate in turn, and publish after every step; version 1 is the base."""
    torch.set_num_threads(order["threads"])
    source = resolve_model(order["model"], None)
    steps, rates = order["steps"], order["rates"]
    total = steps * len(rates)
    job = Tuning(source, order["data"], rates[0], total, order["batch"], order["seq"], order["seed"])
    token = bytes.fromhex(order["token"])
    with Publisher(weights_of(job.model), order["host"], 0, token, "state demo", torch.bfloat16) as publisher:
        publisher.publish(step=0)
        layout = publisher.history.layout
        say("listening", port=publisher.port, nbytes=layout.nbytes, numel=layout.numel)
        orders.wait_for("go", PATIENCE)
        for step in range(total):
            job.rate = rates[step // steps]
            began = time.perf_counter()
            loss = job.step()
            trained = time.perf_counter()
            version = publisher.publish(step=step + 1, lr=job.rate)
            ended = time.perf_counter()
            say("published", version=version.number, step=step + 1, rate=job.rate, loss=loss,
                changed=version.changed, training=trained - began, publishing=ended - trained,
                published=version.published, sent=publisher.sent)  # fmt: skip
        say("trained", version=publisher.newest.number, digest=digest(weights_of(job.model)))
        orders.wait_for("stop", PATIENCE)


class Following:
    """A follower's process: it uses the newest weights, and obeys orders about its connection."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._order = order
        source = resolve_model(order["model"], None)
        self._tokenizer, self._model = source.tokenizer, base_model(source, torch.bfloat16)
        self._gate = Gate(order["host"], order["port"], order["rate"], order["delay"])
        token = bytes.fromhex(order["token"])
        self._follower = Follower("127.0.0.1", self._gate.port, token, into=self._model)
        self._reported, self._written, self._worst = 0, 0.0, 0.0
        self._ended = threading.Event()
        self._reports = threading.Thread(target=self._report, name="reports", daemon=True)

    def run(self, orders: Orders) -> None:
        """Follow until the order comes to finish, then say what is held."""
        say("following")
        self._reports.start()
        while (word := orders.next(0.2)) is None or not word.startswith("finish"):
            if word == "cut":
                self._gate.shut()
            elif word == "restore":
                self._gate.open()
            self._use()
        self._finish(int(word.split()[1]))
        orders.wait_for("stop", PATIENCE)

    def _use(self) -> None:
        """Bring the model forward between two of its uses; write something now and then."""
        if not self._follower.held.hash:
            return
        self._worst = max(self._worst, self._follower.apply_to(self._model).pause)
        due = time.monotonic() - self._written >= self._order["every"]
        if self._order["prompt"] and due:
            replica = self._follower.replica
            version, step = replica.version, replica.meta.get("step", 0)
            began = time.monotonic()
            text = write_on(self._model, self._tokenizer, self._order["prompt"], self._order["tokens"])
            self._written = time.monotonic()
            say("wrote", version=version, step=step, text=text, seconds=self._written - began)

    def _report(self) -> None:
        while not self._ended.wait(EVERY):
            self._say_news()

    def _say_news(self) -> None:
        ahead = time.time() - time.monotonic()
        news = [a for a in list(self._follower.arrivals) if a.version > self._reported]
        for a in news:
            say("arrived", version=a.version, age=a.age, nbytes=a.nbytes, seconds=a.seconds,
                when=a.at + ahead)  # fmt: skip
            self._reported = a.version
        s = self._follower.status
        say("status", version=s.version, held=s.held, age=s.age, nbytes=s.nbytes, ratio=s.ratio, trip=s.trip,
            connected=s.connected, abandoned=s.abandoned, pause=self._worst)  # fmt: skip

    def _finish(self, version: int) -> None:
        """Wait for the last version, put it to use, check it, and say what it is."""
        self._follower.wait(version, PATIENCE)
        while self._follower.replica.version < version:
            self._use()
        self._ended.set()
        self._reports.join(5.0)
        self._say_news()
        self._follower.replica.check()
        held = self._follower.replica.version
        say("finished", version=held, digest=digest(weights_of(self._model)), pause=self._worst)


def follow(order: Mapping[str, Any], orders: Orders) -> None:
    """Follow what is published, through a gate that can be shut."""
    following = Following(order)
    following.run(orders)


if __name__ == "__main__":
    run_worker(train if sys.argv[1:] == ["train"] else follow)
