"""The rank program of deployed federations: the first rank serves, each other one is a client."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from thinwire.links.hub.spoke import Spoke
from thinwire.runs.options import option
from thinwire.runs.ranks.config import RunConfig
from thinwire.runs.ranks.rendezvous import place
from thinwire.runs.ranks.worker import await_order, say
from thinwire.uses.federated.client import Client
from thinwire.uses.federated.conductor import Made
from thinwire.uses.federated.journal import WitnessedServer
from thinwire.uses.federated.message import Update, Version
from thinwire.uses.federated.recipes import METHOD, parse_federated_recipe
from thinwire.uses.federated.remote.guest import Guest
from thinwire.uses.federated.residuals import Residuals
from thinwire.uses.federated.run.joining import own_samples, step_seconds
from thinwire.uses.federated.run.machines import ServeConfig
from thinwire.uses.federated.run.options import FederatedConfig
from thinwire.uses.federated.run.recorder import digest, lengths
from thinwire.uses.federated.run.serving import Serving
from thinwire.uses.federated.run.setup import Setup

JOURNAL = "journal.json"
PATIENCE = 600.0  # seconds


@dataclass(frozen=True)
class DeployConfig(RunConfig):
    """What a deployed federation learns, as JSON of its configuration."""

    federated: str = option("{}", "Job", "The configuration.", metavar="JSON")

    @property
    def learning(self) -> FederatedConfig:
        """What is learnt, by whom."""
        return FederatedConfig.from_json(self.federated)

    @property
    def ranks(self) -> int:
        return self.learning.clients + 1


def run_rank(config: DeployConfig) -> None:
    """Serve as the first rank, take part as another; one thread each, as whoever simulates it."""
    rank, _ = place()
    torch.set_num_threads(1)
    if rank == 0:
        serve(config)
    else:
        take_part(config, rank - 1)


def serve(config: DeployConfig) -> None:
    """Serve all rounds, and leave a journal of them."""
    token = secrets.token_bytes(16)
    os.environ["THINWIRE_TOKEN"] = token.hex()
    own = {"host": config.host, "port": 0, "out": config.out, "deadline": PATIENCE}
    learning = config.learning
    ends: list[float] = []

    def told(name: str, made: Made, accuracy: float | None) -> None:
        ends.append(made.at)
        say("version", number=made.number)

    asked = ServeConfig.from_dict(learning.to_dict() | own)
    serving = Serving(asked.replace(eval_every=learning.rounds), told, print, journal=True)
    serving.run(lambda hub: say("listening", port=hub.port, token=token.hex()))
    server = serving.server
    if isinstance(server, WitnessedServer):
        (Path(config.out) / JOURNAL).write_text(json.dumps(server.journal), "utf-8")
    say("served", weights=digest(server), rounds=lengths(ends), wire=serving.wire)
    await_order("stop", PATIENCE)


def take_part(config: DeployConfig, client: int) -> None:
    """Train as one client, whose data are its part of those of the run."""
    learning = config.learning
    setup = Setup.of(learning, config.seed)
    method = parse_federated_recipe(learning.ways[0]).schemes[METHOD]
    samples = own_samples(setup.data, setup.parts[client], learning.batch)
    own = Timed(client, setup.model, samples, Residuals(method.memory), seed=config.seed)
    port, token = await_order("join", PATIENCE)
    spoke = Spoke.connect(os.environ["MASTER_ADDR"], int(port), token=token.encode())
    try:
        guest = Guest(spoke, PATIENCE, print)
        guest.terms(client)
        guest.serve(own, step_seconds(own))
    finally:
        spoke.close()
    say("finished", step_seconds=own.seconds / max(1, own.steps))
    await_order("stop", PATIENCE)


class Timed(Client):
    """A client that counts the seconds of its turns, coding included."""

    seconds = 0.0
    steps = 0

    def train(self, version: Version, start: Tensor | None = None) -> Update:
        began = time.perf_counter()
        update = super().train(version, start)
        self.seconds += time.perf_counter() - began
        self.steps += version.steps
        return update
