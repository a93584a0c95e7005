"""Runs on the virtual clock: each method with each seed; one that fails takes nothing from the others."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from thinwire.choosing.registry import Recipe
from thinwire.rounds.client_profile import FederatedPolicy
from thinwire.rounds.residuals import ClientResiduals
from thinwire.runs.records.finished_runs import slug
from thinwire.runs.records.run_record import status_of
from thinwire.types import ThinwireError
from thinwire.uses.federated.recipes import METHOD, Method, parse_federated_recipe
from thinwire.uses.federated.run.datasets import load_dataset
from thinwire.uses.federated.run.federated_recorder import FederatedRecorder, Told, new_server
from thinwire.uses.federated.run.federated_setup import Setup
from thinwire.uses.federated.run.fleet import Fleet, load_fleet
from thinwire.uses.federated.run.options import FederatedConfig
from thinwire.uses.federated.run.partitioner import Partitioner
from thinwire.uses.federated.run.simulation import Simulation
from thinwire.uses.federated.run.trainer import InProcessTrainer, Trainer, TrainerPool, one_thread, workers_of

FREE = "What the server sends takes no time here, as papers assume; its bytes count."


class Comparison:
    """The runs that a configuration asks for; to make it writes nothing.

    Errors: ``InputError`` for an unknown method, device file, split or data set, and for what does not fit.
    """

    def __init__(self, config: FederatedConfig) -> None:
        self.config = config
        self._recipes = {name: parse_federated_recipe(name) for name in config.ways}
        self._fleet = load_fleet(config.devices, config.clients)
        Partitioner.parse(config.split)  # a wrong one is refused before data are read
        data = load_dataset(config.data)
        self._setups = [Setup.of(config, seed, data) for seed in config.every_seed]

    def run(self, told: Told) -> Generator[Outcome, None, None]:
        """Yield each run's outcome as it ends, the methods of the first seed first."""
        for setup in self._setups:
            with one_thread(), closing(_trainer(setup)) as trainer:
                for name, recipe in self._recipes.items():
                    folder = folder_of(self.config, name, setup.seed)
                    started = self.config, setup, self._fleet, trainer, name, recipe, folder, told
                    yield FederatedRun(*started).go()


def run_all(config: FederatedConfig, told: Told) -> list[Path]:
    """Run every method with every seed, and return the folders of their records, in that order.

    Errors: that of the first run that failed, once all have ended.
    """
    outcomes = list(Comparison(config).run(told))
    raise_failure(outcomes)
    return [outcome.folder for outcome in outcomes]


def raise_failure(outcomes: list[Outcome]) -> None:
    """Raise the error of the first run that failed, with its exit code and all their names, if any did."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if not failed:
        return
    names = ", ".join(dict.fromkeys(outcome.name for outcome in failed))
    done = f"{len(outcomes) - len(failed)} of {len(outcomes)} runs finished"
    error = ThinwireError(f"{names} failed, {done}: {failed[0].error}")
    error.exit_code = failed[0].error.exit_code if failed[0].error else error.exit_code
    raise error from failed[0].error


def folder_of(config: FederatedConfig, name: str, seed: int) -> Path:
    """Return where the record of a method and seed is."""
    several = len(config.every_seed) > 1
    return Path(config.out) / (f"{slug(name)}-{seed}" if several else slug(name))


def _trainer(setup: Setup) -> Trainer:
    count = workers_of(setup.config, setup.on.device)
    return InProcessTrainer(setup.compute) if count == 1 else TrainerPool(setup.config, setup.seed, count)


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
        method: Method = self.recipe.schemes[METHOD]
        self.server = new_server(self.setup, self.name, self.recipe)
        for device in self.fleet.to_policy([len(part) for part in self.setup.parts]):
            self.server.join(device)
        self._residuals = ClientResiduals(method.memory)
        self._recorder = FederatedRecorder(
            self.setup, self.name, self.recipe.spec, self.server, self.folder, self.told
        )

    def go(self) -> Outcome:
        """Run to the end, and write the record: ``failed`` where versions could not go on, as a note says."""
        config, notes = self.config, self._recorder.record.notes
        simulation = Simulation(
            self.server,
            self.setup.clients(self._residuals),
            self.fleet,
            self.trainer,
            self._recorder.made,
            self.setup.seed,
            config.participate,
            config.downlink == "free",
            config.budget_seconds or float("inf"),
        )
        notes += [FREE] if config.downlink == "free" else []
        status, error = "done", None
        try:
            simulation.run()
        except ThinwireError as e:
            status, error = status_of(e), e
            notes.append(str(e))
        except BaseException as e:
            status = status_of(e)
            raise
        finally:
            self._recorder.close(status, simulation.now, simulation.tally, self.trainer.peaks())
            self._residuals.close()
            self.trainer.forget()
        return Outcome(self.name, self.folder, error)
