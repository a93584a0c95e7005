"""The recorder of a federated run, on a virtual clock or on real machines: versions become its record."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.choosing.registry import Recipe
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client_profile import FederatedPolicy
from thinwire.rounds.client_scheduler import MadeVersion, TurnCounts
from thinwire.rounds.local_training import Decay
from thinwire.runs.machine.processor import environment, peak_rss_bytes, resident_peak
from thinwire.runs.records.run_record import PeakMemory, RecipeText
from thinwire.runs.records.writer import RunWriter
from thinwire.uses.federated.recipes import METHOD, Method
from thinwire.uses.federated.run.federated_setup import LOOKED_AT, Setup
from thinwire.uses.federated.run.record import (
    Accuracy,
    AccuracyPoint,
    ClientFigures,
    FederatedRecord,
    ModelVersionMetrics,
    RefusedUpdate,
)

POINTS = 200  # evaluations of a run, about, unless it is asked for others
DONE = "done"
WAITS = 40  # parts of the budget, after each of which the next version is evaluated too
SOME = (
    f"Accuracies on the way are of {LOOKED_AT} held-out samples, drawn at random; the last one, and one that "
    "comes to the target, are of all."
)
Told = Callable[[str, MadeVersion, float | None], object]  # of a version: the run, what it is, its accuracy


class FederatedRecorder:
    """Keep the record of one method with one seed in ``folder``; ``made`` says whether to go on."""

    def __init__(self, setup: Setup, name: str, spec: str, server: Server, folder: Path, told: Told) -> None:
        self.setup, self.name, self.server = setup, name, server
        self._told, self._config = told, setup.config
        self._every = self._config.eval_every or -(-self._config.versions // POINTS)
        parts = POINTS if self._config.rounds is None and not self._config.eval_every else WAITS
        self._span = (self._config.budget_seconds or float("inf")) / parts
        self._looked = 0.0  # when a version was evaluated last, seconds of the run's clock
        self._points: list[AccuracyPoint] = []
        self._best: Tensor | None = None  # the weights that were found best
        self._target: dict[str, float] | None = None
        self._started = self._before = time.perf_counter()
        self.record = FederatedRecord(
            recipe=RecipeText(name, spec),
            config=self._config.to_dict() | {"methods": name},
            environment=environment(self._config.dtype, 1, setup.on.device),
            seed=setup.seed,
            counts=setup.counts,
            notes=[*setup.data.notes, *([SOME] if setup.looks_at_some else [])],
        )
        self._writer = RunWriter(folder, self.record, server.version)

    def made(self, made: MadeVersion) -> bool:
        """Note a version; return whether to go on."""
        last = made.number >= self._config.versions
        look = made.number % self._every == 0 or made.at - self._looked >= self._span or last
        accuracy = self._accuracy(last) if look else None
        self._told(self.name, made, accuracy)
        density = made.kept / self.setup.values if made.updates else None
        self._add(made, density)
        if accuracy is None:
            return True
        self._looked = made.at
        up, down = self._sent()
        if accuracy > max((p.accuracy for p in self._points), default=-1.0):
            self._best = self.server.weights
        self._points.append(AccuracyPoint(made.number, made.at, up, down, accuracy, density, made.staleness))
        return not (self._reached(accuracy, made.at) or last)

    def _sent(self) -> tuple[int, int]:
        """Return the bytes of all clients and of the server so far."""
        traffic = [self.server.traffic(c) for c in self.server.known]
        return sum(t.up for t in traffic), sum(t.down for t in traffic)

    def _reached(self, accuracy: float, at: float) -> bool:
        """Return whether the target is reached, and note when, and what had been sent by then."""
        until = self._config.until
        if self._target is None and 0 < until <= accuracy:
            up, down = self._sent()
            self._target = {"accuracy": until, "virtual_s": at, "up": up, "down": down}
        return self._target is not None

    def _accuracy(self, last: bool) -> float:
        """Evaluate on some of the held-out samples, and on all where these alone say that it is over."""
        weights, setup = self.server.weights, self.setup
        found = setup.accuracy(weights, all_samples=last)
        if last or not setup.looks_at_some or not 0 < self._config.until <= found:
            return found
        return setup.accuracy(weights, all_samples=True)

    def _best_of(self, final: float) -> float | None:
        """Return what the best version names right of all held-out samples; the last one may be better."""
        return None if self._best is None else max(final, self.setup.accuracy(self._best, all_samples=True))

    def close(self, status: str, seconds: float, tally: TurnCounts, others: Sequence[int] = ()) -> None:
        """Write the final record of a run that lasted ``seconds`` of its clock.

        ``others``: the largest resident sets of other processes, bytes.
        """
        record, server = self.record, self.server
        record.totals |= {
            "seconds": time.perf_counter() - self._started,
            "virtual_s": seconds,
            "rounds": server.version,
            "local_steps": tally.steps.total(),
        }
        traffic = [server.traffic(c) for c in server.known]
        record.bytes = {n: sum(getattr(t, n) for t in traffic) for n in ("up", "down", "raw_up", "raw_down")}
        final = self.setup.accuracy(server.weights, all_samples=True)
        record.accuracy = Accuracy(final, self._best_of(final), self._points)
        if status == DONE:
            self._reached(final, seconds)  # the last version may not have been evaluated on the way
        record.target = self._target
        record.unreached = self._unreached(final) if status == DONE else ""
        record.clients = [self._client(c, tally) for c in server.known]
        record.refused = [RefusedUpdate(r.client, at, r.reason) for at, r in tally.refused]
        record.weights = digest(server)
        record.memory = PeakMemory([resident_peak(os.getpid()) or peak_rss_bytes(), *others])
        self._writer.close(status)

    def _unreached(self, final: float) -> str:
        """Say which rule ended a run before it came to its target; nothing where it did, or had none."""
        config = self._config
        if not config.until or self._target is not None:
            return ""
        over = self.server.version >= config.versions
        ended = f"--rounds, {config.versions}," if over else f"--budget {config.budget}"
        return f"{ended} ended it at {final:.1%}, before --until {config.until:.1%}"

    def _add(self, made: MadeVersion, density: float | None) -> None:
        now = time.perf_counter()
        line = ModelVersionMetrics(
            version=made.number,
            seconds=now - self._before,
            virtual_s=made.at,
            updates=made.updates,
            staleness=made.staleness,
            density=density,
        )
        self._before = now
        self._writer.add(line)

    def _client(self, client: int, tally: TurnCounts) -> ClientFigures:
        t = self.server.traffic(client)
        return ClientFigures(
            client,
            self.server.device(client).samples,
            tally.steps[client] / max(1, tally.turns[client]),
            tally.kept[client] / (t.updates * self.setup.values) if t.updates else None,
            t.updates,
            t.up,
            t.down,
            t.staleness / max(1, t.updates),
        )


def new_server(
    setup: Setup, name: str, recipe: Recipe[Method, FederatedPolicy], kind: type[Server] = Server
) -> Server:
    """Return the server of a run that begins, by the recipe that ``name`` asked for."""
    config, method = setup.config, recipe.schemes[METHOD]
    rates = Decay(config.lr, config.decay, config.versions)
    policy = with_steps(recipe.policy, name, config.steps)
    setup.parameters.write(setup.weights)  # another method's run may have left its own there
    return kind(setup.parameters, method.rule, policy, method.download, rates)


def lengths(ends: Sequence[float]) -> list[float]:
    """Return the seconds that each version took, from when each was made.

    >>> lengths([1.0, 3.0])
    [1.0, 2.0]
    """
    return [b - a for a, b in zip([0.0, *ends], ends, strict=False)]


def digest(server: Server) -> str:
    """Return the SHA-256 of the newest weights, as float32 bytes."""
    return hashlib.sha256(server.weights.numpy().tobytes()).hexdigest()


def with_steps(policy: Any, name: str, steps: int) -> FederatedPolicy:
    """Return a policy with ``--steps`` local steps, where it takes a number that its name does not say."""
    fixed = hasattr(policy, "steps") and "steps=" not in name
    made: FederatedPolicy = replace(policy, steps=steps) if fixed else policy
    return made
