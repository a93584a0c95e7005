"""The same method in real processes here: whether they come to the same weights, in the time foretold."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.links.hub.spoke import Spoke
from thinwire.links.profile import Profile
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client import Client, step_seconds
from thinwire.rounds.client_profile import ClientPace
from thinwire.rounds.client_scheduler import MadeVersion
from thinwire.rounds.journal import JournalEntry, WitnessedServer, replay
from thinwire.rounds.remote.remote_client import RemoteClient
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import Update, VersionMessage
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.options import option
from thinwire.runs.ranks.launcher import launcher_of
from thinwire.runs.ranks.rank_main import await_order, say
from thinwire.runs.ranks.rendezvous import rank_and_world
from thinwire.runs.ranks.run_config import RunConfig
from thinwire.runs.ranks.supervise import Workers
from thinwire.runs.records.writer import RUN, load_run, write_json
from thinwire.uses.federated.recipes import METHOD, Method, parse_federated_recipe
from thinwire.uses.federated.run.client_program import own_samples
from thinwire.uses.federated.run.federated_recorder import digest, lengths, new_server
from thinwire.uses.federated.run.federated_setup import Setup, training_in
from thinwire.uses.federated.run.fleet import Fleet, VirtualDevice
from thinwire.uses.federated.run.options import FederatedConfig, ServeConfig
from thinwire.uses.federated.run.record import FederatedRecord
from thinwire.uses.federated.run.server_program import FederationServer
from thinwire.uses.federated.run.simulation import Simulation
from thinwire.uses.federated.run.trainer import InProcessTrainer as InProcess
from thinwire.uses.federated.run.trainer import one_thread

PROGRAM = "thinwire.uses.federated.run.deployment:run_rank"
FOLDER = "deployed"
JOURNAL = "journal.json"
PATIENCE = 600.0  # seconds


@dataclass
class Deployed:
    """What came of real processes: see ``deployment`` of the record."""

    weights: str  # SHA-256
    rounds: list[float]  # seconds of each version
    steps: list[float]  # seconds of a local step, by client, the mean of all turns
    wire: dict[str, int]  # bytes through the server's sockets, by direction
    valid: bool | None = None  # whether an emulated network kept time


def deploy_as(config: FederatedConfig, folder: Path, rounds: int | None = None) -> None:
    """Run in real processes what the record in ``folder`` is of, and write there what came of it.

    ``rounds``: how many versions, by default as many as it has.
    """
    record = load_run(folder, FederatedRecord)
    record.deployment = deploy(config, record.recipe.name, rounds or int(record.totals["rounds"]))
    write_json(folder / RUN, record.to_dict())


@one_thread()
def deploy(config: FederatedConfig, name: str, rounds: int) -> dict[str, Any]:
    """Run a method for so many versions in real processes, and do the same again in this one.

    A method in rounds is simulated, which also foretells its time; of another, whose versions depend on who
    came when, the turns are done again as the server's journal has them. Return what the record says of it.
    """
    seed = config.every_seed[0]
    config = config.replace(rounds=rounds, until=0.0, methods=shlex.join([name]), seeds=str(seed), budget="")
    found = _run(config, seed)
    setup = Setup.of(config, seed)
    recipe = parse_federated_recipe(name)
    method: Method = recipe.schemes[METHOD]
    server = new_server(setup, name, recipe)
    foretold: list[float] = []
    if method.rule.in_rounds:
        foretold = _simulate(config, setup, method, server, found.steps)
    else:
        text = (_folder(config) / JOURNAL).read_text("utf-8")
        clients = setup.clients(ClientResiduals(method.memory))
        replay((JournalEntry(*entry) for entry in json.loads(text)), server, clients)
    return {
        "method": name,
        "processes": config.clients + 1,
        "check": "simulated" if method.rule.in_rounds else "turns done again",
        "identical": digest(server) == found.weights,
        "weights": found.weights,
        "link": config.link,
        "emulated": config.emulate,
        "kept_time": found.valid,
        "seconds": found.rounds,
        "foretold_s": foretold,
        "ratio": sum(found.rounds) / sum(foretold) if foretold else None,
        "wire": found.wire,
    }


def _folder(config: FederatedConfig) -> Path:
    return Path(config.out) / FOLDER


def _simulate(
    config: FederatedConfig, setup: Setup, method: Method, server: Server, steps: list[float]
) -> list[float]:
    """Run the same on the virtual clock, with devices as measured; return the seconds of each version."""
    link = Profile.parse(config.link)
    devices = tuple(VirtualDevice(seconds, link) for seconds in steps)
    fleet = Fleet(FOLDER, devices, link)
    for device in fleet.to_policy([len(part) for part in setup.parts]):
        server.join(device)
    ends: list[float] = []

    def made(version: MadeVersion) -> bool:
        ends.append(version.at)
        return version.number < config.versions

    clients = setup.clients(ClientResiduals(method.memory))
    trainer = InProcess(setup.compute)
    Simulation(server, clients, fleet, trainer, made, setup.seed, config.participate).run()
    return lengths(ends)


def _run(config: FederatedConfig, seed: int) -> Deployed:
    folder = _folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    asked = DeployConfig(
        out=str(folder), seed=seed, link=config.link, emulate=config.emulate, federated=config.to_json()
    )
    names = ["server", *(f"client {i}" for i in range(config.clients))]
    with stopped_by_signals(), launcher_of(asked, check=False) as place:
        with Workers(place, PROGRAM, names) as workers:
            for _ in names:
                workers.start(asked)
            found = _meet(workers, config.clients)
        found.valid = place.describe().get("valid")
        return found


def _meet(workers: Workers, clients: int) -> Deployed:
    """Tell the clients where the server is, and hear what came of it."""
    server = workers.until("listening", 0)
    for rank in range(1, clients + 1):
        workers.order(rank, f"join {server['port']} {server['token']}")
    end, steps = None, dict[int, float]()
    while end is None or len(steps) < clients:
        rank, said = workers.hear(PATIENCE)
        if said["kind"] == "served":
            end = said
        elif said["kind"] == "finished":
            steps[rank] = said["step_seconds"]
    workers.dismiss()
    by_client = [steps[rank] for rank in sorted(steps)]
    return Deployed(end["weights"], end["rounds"], by_client, end["wire"])


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
    rank, _ = rank_and_world()
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

    def told(name: str, made: MadeVersion, accuracy: float | None) -> None:
        ends.append(made.at)
        say("version", number=made.number)

    asked = ServeConfig.from_dict(learning.to_dict() | own)
    serving = FederationServer(asked.replace(eval_every=learning.rounds), told, print, journal=True)
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
    residuals, how = ClientResiduals(method.memory), training_in(setup.on)
    own = TimedClient(client, setup.model, samples, residuals, seed=config.seed, **how)
    port, token = await_order("join", PATIENCE)
    spoke = Spoke.connect(os.environ["MASTER_ADDR"], int(port), token=token.encode())
    try:
        remote = RemoteClient(spoke, PATIENCE, print)
        remote.terms(client)
        remote.serve(own, ClientPace(step_seconds(own)))
    finally:
        spoke.close()
    say("finished", step_seconds=own.seconds / max(1, own.steps))
    await_order("stop", PATIENCE)


class TimedClient(Client):
    """A client that counts the seconds of its turns, coding included."""

    seconds = 0.0
    steps = 0

    def train(self, version: VersionMessage, start: Tensor | None = None) -> Update:
        began = time.perf_counter()
        update = super().train(version, start)
        self.seconds += time.perf_counter() - began
        self.steps += version.steps
        return update
