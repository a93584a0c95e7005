"""A client of a federation on another machine: its data stay here, what it has learnt goes there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.channels.memory import ErrorFeedback, NoMemory
from thinwire.codecs import Raw
from thinwire.links.hub.spoke import Spoke
from thinwire.links.security import read_token
from thinwire.types import InputError, require
from thinwire.uses.federated.client import Client
from thinwire.uses.federated.message import Form, Version
from thinwire.uses.federated.remote.guest import Guest
from thinwire.uses.federated.remote.words import text
from thinwire.uses.federated.residuals import Residuals
from thinwire.uses.federated.row import Parameters
from thinwire.uses.federated.run.machines import JoinConfig
from thinwire.uses.federated.run.models import build_model
from thinwire.uses.federated.run.splits import Split
from thinwire.uses.federated.run.tasks import Dataset, load_dataset
from thinwire.uses.federated.run.terms import Terms
from thinwire.uses.federated.samples import Samples

TRIED = 3  # local steps that are timed before the first turn


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
        guest = Guest(spoke, config.patience, noted)
        asked = config.client if config.client >= 0 else config.share[0] if config.share else None
        terms = guest.terms(asked)
        client = make_client(config, terms, data)
        noted(f"client {client.id} of {spoke.peer}: {text(terms, 'method')}, {client.data.samples} samples")
        return guest.serve(client, step_seconds(client))
    finally:
        spoke.close()


def make_client(config: JoinConfig, terms: Mapping[str, Any], data: Dataset) -> Client:
    """Return the client that a server's terms ask for. Errors: ``InputError`` where the data do not fit."""
    asked = Terms.read(terms)
    name = _model(config, asked.model)
    asked.check(data, f"--data {config.data}", name)
    model = build_model(name, data.shape, asked.classes, asked.seed)
    asked.check_count(Parameters(model).numel)
    residuals = Residuals(ErrorFeedback() if asked.feedback else NoMemory())
    samples = own_samples(data, _part(config, data, asked.seed), asked.batch)
    return Client(asked.client, model, samples, residuals, seed=asked.seed)


def own_samples(data: Dataset, part: Tensor, batch: int) -> Samples:
    """Return the samples of one client."""
    return Samples(data.inputs[part], data.labels[part], batch, prepare=data.prepare)


def step_seconds(client: Client) -> float:
    """Return how long a local step takes here, measured."""
    start = torch.zeros(1, client.values)
    trial = Version(0, 0, 0, 0, Form.FULL, (), TRIED, 1e-6, Raw())
    client.change(trial, start)  # the first one sets torch up
    began = time.perf_counter()
    client.change(trial, start)
    return max(1e-6, (time.perf_counter() - began) / TRIED)


def _model(config: JoinConfig, theirs: str) -> str:
    """Return the model's name; code is not imported because a server says so."""
    wrong = f"the server trains {theirs[:80]!r}, a model of its own; give it here as --model"
    require(bool(config.model) or ":" not in theirs, InputError, wrong)
    return config.model or theirs


def _part(config: JoinConfig, data: Dataset, seed: int) -> Tensor:
    if config.share is None:
        return torch.arange(len(data))
    place, parts = config.share
    return Split.parse(config.split).deal(data, parts, seed)[place]
