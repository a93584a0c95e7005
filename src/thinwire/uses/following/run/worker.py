"""The rank program of the state demo: one rank trains and publishes, the others follow."""

from __future__ import annotations

import os
import secrets
import threading
import time

import torch

from thinwire.links.profile import Profile
from thinwire.runs.machine.processor import cores
from thinwire.runs.models.source import resolve_model
from thinwire.runs.ranks.rendezvous import place
from thinwire.runs.ranks.worker import await_order, next_order, say
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.recipes import STATE, VALUES
from thinwire.uses.following.run.config import RATES, RECIPE, StateConfig
from thinwire.uses.following.run.gate import Gate
from thinwire.uses.following.run.job import Tuning, base_model, digest, weights_of, write_on

PATIENCE = 300.0  # seconds
EVERY = 0.5  # seconds between two reports


def run_rank(config: StateConfig) -> None:
    """Train and publish as the first rank, follow as another."""
    rank, _ = place()
    if rank == 0:
        train(config)
    else:
        Following(config, writes=rank == 1).run()


def train(config: StateConfig) -> None:
    """Fine-tune at each rate in turn, and publish after every step; version 1 is the base."""
    torch.set_num_threads(config.threads or max(1, cores()))
    source = resolve_model(config.model, None, trial=False)
    job = Tuning(source, config.data, RATES[0], config.total, config.batch, config.seq, config.seed)
    token = secrets.token_bytes(16)
    options = STATE.parse(RECIPE).schemes[VALUES].options
    with Publisher(weights_of(job.model), config.host, 0, token, "state demo", **options) as publisher:
        publisher.publish(step=0)
        layout = publisher.history.layout
        say("listening", port=publisher.port, token=token.hex(), nbytes=layout.nbytes, numel=layout.numel)
        await_order("go", PATIENCE)
        for step in range(config.total):
            job.rate = RATES[step // config.steps]
            began = time.perf_counter()
            loss = job.step()
            trained = time.perf_counter()
            version = publisher.publish(step=step + 1, lr=job.rate)
            ended = time.perf_counter()
            say("published", version=version.number, step=step + 1, rate=job.rate, loss=loss,
                changed=version.changed, training=trained - began, publishing=ended - trained,
                published=version.published, sent=publisher.sent)  # fmt: skip
        say("trained", version=publisher.newest.number, digest=digest(weights_of(job.model)))
        await_order("stop", PATIENCE)


class Following:
    """A follower's process: it uses the newest weights, and obeys orders about its connection."""

    def __init__(self, config: StateConfig, writes: bool) -> None:
        torch.set_num_threads(1)
        self._config, self._writes = config, writes
        source = resolve_model(config.model, None, trial=False)
        self._tokenizer, self._model = source.tokenizer, base_model(source, torch.bfloat16)
        port, token = await_order("follow", PATIENCE)
        self._gate = Gate(os.environ["MASTER_ADDR"], int(port), *throttle(config))
        self._follower = Follower("127.0.0.1", self._gate.port, bytes.fromhex(token), into=self._model)
        self._reported, self._written, self._worst = 0, 0.0, 0.0
        self._ended = threading.Event()
        self._reports = threading.Thread(target=self._report, name="reports", daemon=True)

    def run(self) -> None:
        """Follow until the order comes to finish, then say what is held."""
        say("following")
        self._reports.start()
        while (order := next_order(0.2))[:1] != ["finish"]:
            if order == ["cut"]:
                self._gate.shut()
            elif order == ["restore"]:
                self._gate.open()
            self._use()
        self._finish(int(order[1]))
        await_order("stop", PATIENCE)

    def _use(self) -> None:
        """Bring the model forward between two of its uses; write something now and then."""
        if not self._follower.held.hash:
            return
        self._worst = max(self._worst, self._follower.apply_to(self._model).pause)
        config, due = self._config, time.monotonic() - self._written >= self._config.every
        if self._writes and config.prompt and due:
            replica = self._follower.replica
            version, step = replica.version, replica.meta.get("step", 0)
            began = time.monotonic()
            text = write_on(self._model, self._tokenizer, config.prompt, config.tokens)
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


def throttle(config: StateConfig) -> tuple[float | None, float]:
    """Return the rate [bytes/s] and the delay [s] of a follower's gate; none where the link is emulated."""
    line = Profile() if config.emulate else Profile.parse(config.link)
    return line.down, line.delay or 0.0
