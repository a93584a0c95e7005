"""Runs of federated learning: each method with each seed, and the record that it leaves."""

from __future__ import annotations

import hashlib
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.engines.federated.conductor import Made
from thinwire.engines.federated.method import Method
from thinwire.engines.federated.rates import Decay
from thinwire.engines.federated.residuals import Residuals
from thinwire.engines.federated.server import Server
from thinwire.lab.federated.devices import load_fleet
from thinwire.lab.federated.fleet import Fleet
from thinwire.lab.federated.options import FederatedConfig
from thinwire.lab.federated.record import (
    Accuracy,
    ClientFigures,
    FederatedRecord,
    Point,
    RefusedUpdate,
    VersionMetrics,
)
from thinwire.lab.federated.setup import Setup
from thinwire.lab.federated.simulate import Simulation
from thinwire.lab.federated.tasks import load_dataset
from thinwire.lab.federated.trainer import Here, Pool, Trainer, workers_of
from thinwire.lab.machine.processor import environment
from thinwire.lab.records.runs import slug
from thinwire.lab.records.schema import Memory, RecipeText
from thinwire.lab.records.writer import RunWriter
from thinwire.policies.federated.device import FederatedPolicy
from thinwire.recipes.federated import METHOD, parse_federated_recipe
from thinwire.types import ThinwireError

POINTS = 200  # evaluations of a run, about
Told = Callable[[str, Made, float | None], None]  # of a version: the run, what it is, its accuracy


def run_all(config: FederatedConfig, told: Told) -> list[Path]:
    """Run every method with every seed, and return the folders of their records, in that order."""
    data, folders = load_dataset(config.data), []
    for seed in config.every_seed:
        setup = Setup.of(config, seed, data)
        fleet = load_fleet(config.devices, config.clients)
        trainer = _trainer(config, setup, seed)
        try:
            for name in config.ways:
                folder = folder_of(config, name, seed)
                FederatedRun(config, setup, fleet, trainer, name, folder, told).go()
                folders.append(folder)
        finally:
            trainer.close()
    return folders


def folder_of(config: FederatedConfig, name: str, seed: int) -> Path:
    """Return where the record of a method and seed is."""
    several = len(config.every_seed) > 1
    return Path(config.out) / (f"{slug(name)}-{seed}" if several else slug(name))


def _trainer(config: FederatedConfig, setup: Setup, seed: int) -> Trainer:
    count = workers_of(config)
    return Here(setup.compute) if count == 1 else Pool(config, seed, count)


@dataclass
class FederatedRun:
    """One method with one seed."""

    config: FederatedConfig
    setup: Setup
    fleet: Fleet
    trainer: Trainer
    name: str
    folder: Path
    told: Told

    def __post_init__(self) -> None:
        recipe = parse_federated_recipe(self.name)
        self.method: Method = recipe.schemes[METHOD]
        self._residuals = Residuals(self.method.memory)
        self._clients = self.setup.clients(self._residuals)
        rates = Decay(self.config.lr, self.config.decay, self.config.rounds)
        policy = with_steps(recipe.policy, self.name, self.config.steps)
        self.server = Server(self.setup.weights, self.method.rule, policy, self.method.download, rates)
        for device in self.fleet.to_policy([len(part) for part in self.setup.parts]):
            self.server.join(device)
        self._every = -(-self.config.rounds // POINTS)
        self._points: list[Point] = []
        self._target: dict[str, float] | None = None
        self._started = self._before = time.perf_counter()
        self.record = self._fresh(recipe.spec)
        self._writer = RunWriter(self.folder, self.record)

    def go(self) -> None:
        """Run to the end, and write the record: ``failed`` where versions could not go on."""
        simulation = Simulation(
            self.server,
            self._clients,
            self.fleet,
            self.trainer,
            self._made,
            self.setup.seed,
            self.config.participate,
            self.config.downlink == "free",
            self.config.budget_seconds or float("inf"),
        )
        status = "done"
        try:
            simulation.run()
        except ThinwireError as e:
            status = "failed"
            self.record.notes.append(str(e))
            raise
        finally:
            self._fill(simulation)
            self._writer.close(status)
            self._residuals.close()

    def _made(self, made: Made) -> bool:
        last = made.number >= self.config.rounds
        look = made.number % self._every == 0 or last
        accuracy = self.setup.accuracy(self.server.weights) if look else None
        self.told(self.name, made, accuracy)
        now = time.perf_counter()
        density = self._density(made)
        self._writer.add(
            VersionMetrics(
                version=made.number,
                seconds=now - self._before,
                virtual_s=made.at,
                updates=made.updates,
                staleness=made.staleness,
                density=density,
            )
        )
        self._before = now
        if accuracy is None:
            return True
        up, down = self._sent()
        self._points.append(Point(made.number, made.at, up, down, accuracy, density, made.staleness))
        reached = 0 < self.config.until <= accuracy
        if reached:
            self._target = {"accuracy": self.config.until, "virtual_s": made.at, "up": up, "down": down}
        return not (last or reached)

    def _density(self, made: Made) -> float | None:
        raw = 4 * self.setup.values * made.updates
        return made.nbytes / raw if raw else None

    def _sent(self) -> tuple[int, int]:
        traffic = [self.server.traffic(c) for c in self._clients]
        return sum(t.up for t in traffic), sum(t.down for t in traffic)

    def _fresh(self, spec: str) -> FederatedRecord:
        config = self.config.to_dict() | {"methods": self.name}
        return FederatedRecord(
            recipe=RecipeText(self.name, spec),
            config=config,
            environment=environment("fp32", 1),
            seed=self.setup.seed,
            counts=self.setup.counts,
            notes=list(self.setup.data.notes),
        )

    def _fill(self, simulation: Simulation) -> None:
        record, server = self.record, self.server
        traffic = {c: server.traffic(c) for c in self._clients}
        record.totals |= {
            "seconds": time.perf_counter() - self._started,
            "virtual_s": simulation.now,
            "rounds": server.version,
            "local_steps": simulation.local_steps,
        }
        names = ("up", "down", "raw_up", "raw_down")
        record.bytes = {name: sum(getattr(t, name) for t in traffic.values()) for name in names}
        final = self.setup.accuracy(server.weights, all_samples=True)
        best = max((p.accuracy for p in self._points), default=None)
        record.accuracy = Accuracy(final, best, self._points)
        record.target = self._target
        record.clients = [self._client(c) for c in sorted(traffic)]
        record.refused = [RefusedUpdate(r.client, at, r.reason) for at, r in simulation.refused]
        record.weights = hashlib.sha256(server.weights.numpy().tobytes()).hexdigest()
        record.memory = Memory(peaks())
        if self.config.downlink == "free":
            record.notes.append(
                "What the server sends takes no time here, as papers assume; its bytes count."
            )

    def _client(self, client: int) -> ClientFigures:
        t = self.server.traffic(client)
        turns = max(1, t.updates)
        ratio = t.up / t.raw_up if t.raw_up else None
        assigned = self.server.assignments()[client]
        return ClientFigures(
            client,
            len(self.setup.parts[client]),
            float(assigned.steps),
            ratio,
            t.updates,
            t.up,
            t.down,
            t.staleness / turns,
        )


def with_steps(policy: Any, name: str, steps: int) -> FederatedPolicy:
    """Return a policy with ``--steps`` local steps, where it takes a number that its name does not say."""
    fixed = hasattr(policy, "steps") and "steps=" not in name
    made: FederatedPolicy = replace(policy, steps=steps) if fixed else policy
    return made


def peaks() -> list[int]:
    """Return the largest resident set of this process, and of the largest of those it started and ended."""
    units = 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units
    others = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * units
    return [own, others] if others else [own]
