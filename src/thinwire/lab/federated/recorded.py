"""One run of federated learning: a method with a seed, and the record that it leaves."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.engines.federated.method import Method
from thinwire.engines.federated.rates import Decay
from thinwire.engines.federated.residuals import Residuals
from thinwire.engines.federated.server import Server
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
from thinwire.lab.federated.simulate import Made, Simulation
from thinwire.lab.federated.trainer import Trainer
from thinwire.lab.machine.processor import environment, peak_rss_bytes, resident_peak
from thinwire.lab.records.schema import Memory, RecipeText, status_of
from thinwire.lab.records.writer import RunWriter
from thinwire.policies.federated.device import FederatedPolicy
from thinwire.recipes.base import Recipe
from thinwire.recipes.federated import METHOD
from thinwire.types import ThinwireError

POINTS = 200  # evaluations of a run, about, unless it is asked for others
WAITS = 40  # parts of the virtual time, after each of which the next version is evaluated too
Told = Callable[[str, Made, float | None], None]  # of a version: the run, what it is, its accuracy


class Outcome(NamedTuple):
    """How a run ended: where its record is, and the error that ended it, if one did."""

    name: str
    folder: Path
    error: ThinwireError | None


@dataclass
class FederatedRun:
    """One method with one seed."""

    config: FederatedConfig
    setup: Setup
    fleet: Fleet
    trainer: Trainer
    name: str  # of the method, as asked for
    recipe: Recipe[Method, FederatedPolicy]
    folder: Path
    told: Told

    def __post_init__(self) -> None:
        self.method: Method = self.recipe.schemes[METHOD]
        self._residuals = Residuals(self.method.memory)
        self._clients = self.setup.clients(self._residuals)
        rates = Decay(self.config.lr, self.config.decay, self.config.rounds)
        policy = with_steps(self.recipe.policy, self.name, self.config.steps)
        self.server = Server(self.setup.weights, self.method.rule, policy, self.method.download, rates)
        for device in self.fleet.to_policy([len(part) for part in self.setup.parts]):
            self.server.join(device)
        self._every = self.config.eval_every or -(-self.config.rounds // POINTS)
        self._span = (self.config.budget_seconds or float("inf")) / WAITS
        self._looked = 0.0  # virtual seconds
        self._points: list[Point] = []
        self._target: dict[str, float] | None = None
        self._started = self._before = time.perf_counter()
        self.record = self._fresh()
        self._writer = RunWriter(self.folder, self.record)

    def go(self) -> Outcome:
        """Run to the end, and write the record: ``failed`` where versions could not go on, as a note says."""
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
        status, error = "done", None
        try:
            simulation.run()
        except ThinwireError as e:
            status, error = status_of(e), e
            self.record.notes.append(str(e))
        except BaseException as e:
            status = status_of(e)
            raise
        finally:
            self._fill(simulation)
            self._writer.close(status)
            self._residuals.close()
            self.trainer.forget()
        return Outcome(self.name, self.folder, error)

    def _made(self, made: Made) -> bool:
        last = made.number >= self.config.rounds
        look = made.number % self._every == 0 or made.at - self._looked >= self._span or last
        self._looked = made.at if look else self._looked
        accuracy = self.setup.accuracy(self.server.weights) if look else None
        self.told(self.name, made, accuracy)
        now = time.perf_counter()
        density = made.kept / self.setup.values if made.updates else None
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

    def _sent(self) -> tuple[int, int]:
        traffic = [self.server.traffic(c) for c in self._clients]
        return sum(t.up for t in traffic), sum(t.down for t in traffic)

    def _fresh(self) -> FederatedRecord:
        config = self.config.to_dict() | {"methods": self.name}
        return FederatedRecord(
            recipe=RecipeText(self.name, self.recipe.spec),
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
            "local_steps": simulation.steps.total(),
        }
        names = ("up", "down", "raw_up", "raw_down")
        record.bytes = {name: sum(getattr(t, name) for t in traffic.values()) for name in names}
        final = self.setup.accuracy(server.weights, all_samples=True)
        best = max((p.accuracy for p in self._points), default=None)
        record.accuracy = Accuracy(final, best, self._points)
        record.target = self._target
        record.clients = [self._client(c, simulation) for c in sorted(traffic)]
        record.refused = [RefusedUpdate(r.client, at, r.reason) for at, r in simulation.refused]
        record.weights = hashlib.sha256(server.weights.numpy().tobytes()).hexdigest()
        own = resident_peak(os.getpid()) or peak_rss_bytes()
        record.memory = Memory([own, *self.trainer.peaks()])
        if self.config.downlink == "free":
            record.notes.append(
                "What the server sends takes no time here, as papers assume; its bytes count."
            )

    def _client(self, client: int, simulation: Simulation) -> ClientFigures:
        t = self.server.traffic(client)
        return ClientFigures(
            client,
            len(self.setup.parts[client]),
            simulation.steps[client] / max(1, simulation.turns[client]),
            simulation.kept[client] / (t.updates * self.setup.values) if t.updates else None,
            t.updates,
            t.up,
            t.down,
            t.staleness / max(1, t.updates),
        )


def with_steps(policy: Any, name: str, steps: int) -> FederatedPolicy:
    """Return a policy with ``--steps`` local steps, where it takes a number that its name does not say."""
    fixed = hasattr(policy, "steps") and "steps=" not in name
    made: FederatedPolicy = replace(policy, steps=steps) if fixed else policy
    return made
