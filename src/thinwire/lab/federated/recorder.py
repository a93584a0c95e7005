"""The recorder of a federated run, on a virtual clock or on real machines: versions become its record."""

from __future__ import annotations

import hashlib
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.engines.federated.conductor import Made
from thinwire.engines.federated.intake import Refusal
from thinwire.engines.federated.server import Server
from thinwire.lab.federated.record import (
    Accuracy,
    ClientFigures,
    FederatedRecord,
    Point,
    RefusedUpdate,
    VersionMetrics,
)
from thinwire.lab.federated.setup import Setup
from thinwire.lab.machine.processor import environment
from thinwire.lab.records.schema import Memory, RecipeText
from thinwire.lab.records.writer import RunWriter
from thinwire.policies.federated.device import FederatedPolicy

POINTS = 200  # evaluations of a run, about
Told = Callable[[str, Made, float | None], object]  # of a version: the run, what it is, its accuracy


class Recorder:
    """Keep the record of one method with one seed in ``folder``; ``made`` says whether to go on.

    ``every``: how many versions to one that is evaluated, besides the last (0: as makes about 200).
    """

    def __init__(
        self,
        setup: Setup,
        name: str,
        spec: str,
        server: Server,
        folder: Path,
        told: Told,
        every: int = 0,
    ) -> None:
        self.setup, self.name, self.server, self.folder = setup, name, server, folder
        self._told, self._config = told, setup.config
        self._every = every or -(-self._config.rounds // POINTS)
        self._points: list[Point] = []
        self._target: dict[str, float] | None = None
        self._started = self._before = time.perf_counter()
        self.record = FederatedRecord(
            recipe=RecipeText(name, spec),
            config=self._config.to_dict() | {"methods": name},
            environment=environment("fp32", 1),
            seed=setup.seed,
            counts=setup.counts,
            notes=list(setup.data.notes),
        )
        self._writer = RunWriter(folder, self.record, server.version)

    def made(self, made: Made) -> bool:
        """Note a version; return whether to go on."""
        last = made.number >= self._config.rounds
        look = made.number % self._every == 0 or last
        accuracy = self.setup.accuracy(self.server.weights) if look else None
        self._told(self.name, made, accuracy)
        now, density = time.perf_counter(), self._density(made)
        line = VersionMetrics(
            version=made.number,
            seconds=now - self._before,
            virtual_s=made.at,
            updates=made.updates,
            staleness=made.staleness,
            density=density,
        )
        self._writer.add(line)
        self._before = now
        if accuracy is None:
            return True
        up, down = self._sent()
        self._points.append(Point(made.number, made.at, up, down, accuracy, density, made.staleness))
        reached = 0 < self._config.until <= accuracy
        if reached:
            self._target = {"accuracy": self._config.until, "virtual_s": made.at, "up": up, "down": down}
        return not (last or reached)

    def close(
        self, status: str, seconds: float, local_steps: int, refused: Iterable[tuple[float, Refusal]]
    ) -> None:
        """Write the final record of a run that lasted ``seconds`` of its clock."""
        record, server = self.record, self.server
        record.totals |= {
            "seconds": time.perf_counter() - self._started,
            "virtual_s": seconds,
            "rounds": server.version,
            "local_steps": local_steps,
        }
        traffic = [server.traffic(c) for c in server.known]
        record.bytes = {n: sum(getattr(t, n) for t in traffic) for n in ("up", "down", "raw_up", "raw_down")}
        final = self.setup.accuracy(server.weights, all_samples=True)
        best = max((p.accuracy for p in self._points), default=None)
        record.accuracy = Accuracy(final, best, self._points)
        record.target = self._target
        record.clients = [self._client(c) for c in server.known]
        record.refused = [RefusedUpdate(r.client, at, r.reason) for at, r in refused]
        record.weights = digest(server)
        record.memory = Memory(peaks())
        self._writer.close(status)

    def _density(self, made: Made) -> float | None:
        raw = 4 * self.setup.values * made.updates
        return made.nbytes / raw if raw else None

    def _sent(self) -> tuple[int, int]:
        traffic = [self.server.traffic(c) for c in self.server.known]
        return sum(t.up for t in traffic), sum(t.down for t in traffic)

    def _client(self, client: int) -> ClientFigures:
        t, assigned = self.server.traffic(client), self.server.assignments().get(client)
        steps = float(assigned.steps) if assigned is not None else 0.0
        ratio = t.up / t.raw_up if t.raw_up else None
        late = t.staleness / max(1, t.updates)
        samples = self.server.device(client).samples
        return ClientFigures(client, samples, steps, ratio, t.updates, t.up, t.down, late)


def digest(server: Server) -> str:
    """Return the SHA-256 of the newest weights, as float32 bytes."""
    return hashlib.sha256(server.weights.numpy().tobytes()).hexdigest()


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
