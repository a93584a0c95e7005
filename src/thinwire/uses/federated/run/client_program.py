"""A client of a federation on another machine: its data stay here, what it has learnt goes there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from thinwire.channels.memory import ErrorFeedback, NoMemory
from thinwire.files.host_memory import memory_bytes
from thinwire.links.hub.spoke import Spoke
from thinwire.links.security import read_token
from thinwire.rounds.client import Client, step_seconds
from thinwire.rounds.client_profile import ClientPace
from thinwire.rounds.local_training import Samples
from thinwire.rounds.parameters import Parameters
from thinwire.rounds.remote.control_messages import text, whole
from thinwire.rounds.remote.remote_client import RemoteClient
from thinwire.rounds.residuals import ClientResiduals
from thinwire.types import MAX_KEY, InputError, PayloadError, require
from thinwire.uses.federated.run.client_models import build_model
from thinwire.uses.federated.run.datasets import Dataset, load_dataset
from thinwire.uses.federated.run.federated_setup import compute_of, training_in
from thinwire.uses.federated.run.options import FederatedConfig, JoinConfig
from thinwire.uses.federated.run.partitioner import Partitioner

CLASSES = 1 << 16  # at most; the largest sets of labels in use have 21,841
SEED = 10**9
NAME = 80  # characters of a name
COPIES = 6  # of a model, that a client holds as it trains: values, gradient, start, copy, change, residual


def join(config: JoinConfig, noted: Callable[[str], object]) -> int:
    """Take part until the server says that it is over; return the number of the last version.

    Errors: ``InputError`` where data or model do not fit the server's; ``LinkError`` naming it.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    data = load_dataset(config.data)  # first: what is missing here is no business of the server's
    host, port = config.place
    spoke = Spoke.connect(host, port, token=read_token(config.token_file))
    try:
        remote = RemoteClient(spoke, config.patience, noted)
        asked = config.client if config.client >= 0 else config.share[0] if config.share else None
        terms = remote.terms(asked)
        client = make_client(config, terms, data)
        noted(f"client {client.id} of {spoke.peer}: {text(terms, 'method')}, {client.data.samples} samples")
        return remote.serve(client, ClientPace(step_seconds(client)))
    finally:
        spoke.close()


def make_client(config: JoinConfig, terms: Mapping[str, Any], data: Dataset) -> Client:
    """Return the client that a server's terms ask for. Errors: ``InputError`` where the data do not fit."""
    asked = ServerTerms.read(terms)
    name = _model(config, asked.model)
    asked.check(data, f"--data {config.data}", name)
    compute = compute_of(config)
    model = build_model(name, data.shape, asked.classes, asked.seed).to(compute.device)
    asked.check_count(Parameters(model).numel)
    residuals = ClientResiduals(ErrorFeedback() if asked.feedback else NoMemory())
    samples = own_samples(data, _part(config, data, asked.seed), asked.batch)
    return Client(asked.client, model, samples, residuals, seed=asked.seed, **training_in(compute))


def own_samples(data: Dataset, part: Tensor, batch: int) -> Samples:
    """Return the samples of one client."""
    return Samples(data.inputs[part], data.labels[part], batch, prepare=data.prepare)


def _model(config: JoinConfig, theirs: str) -> str:
    """Return the model's name; code is not imported because a server says so."""
    wrong = f"the server trains {theirs[:80]!r}, a model of its own; give it here as --model"
    require(bool(config.model) or ":" not in theirs, InputError, wrong)
    return config.model or theirs


def _part(config: JoinConfig, data: Dataset, seed: int) -> Tensor:
    if config.share is None:
        return torch.arange(len(data))
    place, parts = config.share
    return Partitioner.parse(config.split).deal(data, parts, seed)[place]


@dataclass(frozen=True)
class ServerTerms:
    """A server's terms, each in its bounds. ``shape`` is as it came, to be compared."""

    client: int
    method: str
    model: str
    shape: Any
    classes: int
    values: int
    batch: int
    seed: int
    feedback: bool

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ServerTerms:
        """Read ``FederationServer.terms``. Errors: ``PayloadError`` naming what is out of bounds."""
        values = dict(given)
        batch = next(f.metadata["limits"] for f in fields(FederatedConfig) if f.name == "batch")

        def number(name: str, least: int, most: int = MAX_KEY) -> int:
            found = whole(values, name)
            wrong = f"the server's {name} is {found}, which is not in {least}..{most}"
            require(least <= found <= most, PayloadError, wrong)
            return found

        feedback = values.get("feedback")
        wrong = f"the server's feedback is {ascii(feedback)[:40]}, not true or false"
        require(isinstance(feedback, bool), PayloadError, wrong)
        return cls(
            number("client", 0),
            text(values, "method")[:NAME],
            text(values, "model")[:NAME],
            values.get("shape"),
            number("classes", 2, CLASSES),
            number("values", 1),
            number("batch", batch["least"], batch["most"]),
            number("seed", 0, SEED),
            bool(feedback),
        )

    def check(self, data: Dataset, where: str, model: str) -> None:
        """Raise ``InputError`` where the data of ``where`` are not of the server's kind, or ``model`` is not.

        A model that a server may name is counted before it is made.
        """
        theirs = ascii(self.shape)[:80]
        fits = self.shape == list(data.shape) and self.classes >= data.classes
        wrong = (
            f"{where} has samples of {list(data.shape)} in {data.classes} classes, the server's are {theirs}"
        )
        require(fits, InputError, f"{wrong} in {self.classes}; give the same kind of data")
        takes, (total, free) = 4 * COPIES * self.values, memory_bytes()
        have = free or total or takes
        wrong = f"the server's model of {self.values} values takes {takes / 1e9:.3g} GB here"
        require(takes <= have, InputError, f"{wrong}, and {have / 1e9:.3g} are free; train a smaller one")
        if ":" not in model:
            with torch.device("meta"):
                made = build_model(model, data.shape, self.classes, self.seed)
            self.check_count(sum(math.prod(p.shape) for p in made.parameters()))

    def check_count(self, many: int) -> None:
        """Raise ``InputError`` where a model has not as many parameters as the server's."""
        wrong = f"the model has {many} parameters here and {self.values} at the server; give the same --model"
        require(many == self.values, InputError, wrong)
