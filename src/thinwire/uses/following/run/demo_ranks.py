"""The rank program of the state demo: one rank trains and publishes, the others follow."""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.links.profile import Profile
from thinwire.runs.data.batches import Batches
from thinwire.runs.data.corpus import load_corpus
from thinwire.runs.data.task import next_token_loss, pack
from thinwire.runs.machine import devices
from thinwire.runs.machine.processor import cores
from thinwire.runs.models.families import import_transformers
from thinwire.runs.models.model_source import ModelSource, resolve_model
from thinwire.runs.models.tokenizer import tokenise
from thinwire.runs.ranks.rank_main import await_order, next_order, say
from thinwire.runs.ranks.rendezvous import rank_and_world
from thinwire.seeding import seeded
from thinwire.types import InputError, require
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.recipes import STATE, VALUES
from thinwire.uses.following.run.gate import Gate
from thinwire.uses.following.run.options import RATES, RECIPE, StateConfig

CPU = torch.device("cpu")
PATIENCE = 300.0  # seconds
EVERY = 0.5  # seconds between two reports
SEED, TEMPERATURE = 0, 0.8  # of what is written
ENOUGH = 4  # tokens that are prepared, in tokens that are trained on


def run_rank(config: StateConfig) -> None:
    """Train and publish as the first rank, follow as another."""
    rank, _ = rank_and_world()
    device = devices.own(config.device)
    with devices.told():
        if rank == 0:
            train(config, device)
        else:
            FollowerProcess(config, device, writes=rank == 1).run()


def train(config: StateConfig, device: torch.device) -> None:
    """Fine-tune at each rate in turn, and publish after every step; version 1 is the base."""
    torch.set_num_threads(config.threads or max(1, cores()))
    source = resolve_model(config.model, None, trial=False)
    about = RATES[0], config.total, config.batch, config.seq, config.seed
    job = Tuning(source, config.data, *about, device=device)
    token = secrets.token_bytes(16)
    options = STATE.parse(RECIPE).schemes[VALUES].options
    with Publisher(weights_of(job.model), config.host, 0, token, "state demo", **options) as publisher:
        publisher.publish(step=0)
        layout = publisher.history.layout
        say("listening", port=publisher.port, token=token.hex(), nbytes=layout.nbytes, numel=layout.numel,
            device=devices.facts(device))  # fmt: skip
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


class FollowerProcess:
    """A follower's process: it uses the newest weights, and obeys orders about its connection."""

    def __init__(self, config: StateConfig, device: torch.device, writes: bool) -> None:
        torch.set_num_threads(1)
        self._config, self._device, self._writes = config, device, writes
        source = resolve_model(config.model, None, trial=False)
        self._tokenizer, self._model = source.tokenizer, base_model(source, torch.bfloat16, device)
        port, token = await_order("follow", PATIENCE)
        self._gate = Gate(os.environ["MASTER_ADDR"], int(port), *throttle(config))
        self._follower = Follower("127.0.0.1", self._gate.port, bytes.fromhex(token), into=self._model)
        self._reported, self._written, self._worst = 0, 0.0, 0.0
        self._ended = threading.Event()
        self._reports = threading.Thread(target=self._report, name="reports", daemon=True)

    def run(self) -> None:
        """Follow until the order comes to finish, then say what is held."""
        say("following", device=devices.facts(self._device))
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


def base_model(source: ModelSource, dtype: torch.dtype, device: torch.device = CPU) -> Any:
    """Return the model with weights cast to bfloat16, held as ``dtype`` on a device: the same values on any.

    Buffers stay float32: they are no weights. Errors: ``InputError`` for a model without weights.
    """
    require(source.weights is not None, InputError, f"{source.name} has no weights; name a pretrained model")
    transformers = import_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(source.weights, dtype=torch.float32)
    for x in model.parameters():
        x.data = x.data.to(torch.bfloat16).to(dtype)
    return model.eval().to(device)


class Tuning:
    """AdamW over float32 weights that begin at bfloat16 values; ``step`` is one optimiser step.

    ``rate`` may be set between two steps. Errors: ``InputError`` where the text is too short.
    """

    def __init__(
        self,
        source: ModelSource,
        data: str,
        rate: float,
        steps: int,
        batch: int,
        seq: int,
        seed: int,
        device: torch.device = CPU,
    ) -> None:
        self.model, self._device = base_model(source, torch.float32, device), device
        wanted = ENOUGH * steps * batch * seq
        self._blocks = pack(tokenise(source.tokenizer, *load_corpus(data).train, limit=wanted), seq)
        source.check_tokens(self._blocks)
        self._order = iter(Batches(len(self._blocks), batch, steps=steps, seed=seed, seq=seq))
        self._optimiser = torch.optim.AdamW(self.model.parameters(), lr=rate)

    @property
    def rate(self) -> float:
        return float(self._optimiser.param_groups[0]["lr"])

    @rate.setter
    def rate(self, rate: float) -> None:
        for group in self._optimiser.param_groups:
            group["lr"] = rate

    def step(self) -> float:
        """Train on the next batch and return its loss in nats a token."""
        ids = self._blocks[next(self._order)].to(self._device)
        loss = next_token_loss(self.model(ids[:, :-1]).logits, ids[:, 1:])
        loss.backward()
        self._optimiser.step()
        self._optimiser.zero_grad()
        return float(loss.detach())


def write_on(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """Return what ``model`` writes after ``prompt``, drawn with a seed of its own: equal weights agree.

    Drawn, since the likeliest tokens of a model hardly change over some steps of training.
    """
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)], device=model.device)
    with torch.no_grad(), seeded(SEED):
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=True,
            temperature=TEMPERATURE,
            pad_token_id=0,
        )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the bits of all tensors as bfloat16, by name: equal where every bit is.

    >>> digest({"a": torch.ones(2), "b": torch.zeros(1)})[:8]
    '3c592610'
    """
    found = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name].detach().to("cpu", torch.bfloat16).contiguous()
        found.update(f"{name} {tuple(x.shape)}\n".encode())
        found.update(x.reshape(-1).view(torch.int16).numpy().data)
    return found.hexdigest()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model by name, tied ones once; not copied."""
    return {name: x.detach() for name, x in model.named_parameters()}
