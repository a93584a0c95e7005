"""Runs of federated learning: each method with each seed; one that fails takes nothing from the others."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from pathlib import Path

from thinwire.runs.records.runs import slug
from thinwire.types import ThinwireError
from thinwire.uses.federated.recipes import parse_federated_recipe
from thinwire.uses.federated.run.devices import load_fleet
from thinwire.uses.federated.run.options import FederatedConfig
from thinwire.uses.federated.run.recorder import Told
from thinwire.uses.federated.run.setup import Setup
from thinwire.uses.federated.run.splits import Split
from thinwire.uses.federated.run.tasks import load_dataset
from thinwire.uses.federated.run.trainer import Here, Pool, Trainer, one_thread, workers_of
from thinwire.uses.federated.run.virtual import FederatedRun, Outcome


class Comparison:
    """The runs that a configuration asks for; to make it writes nothing.

    Errors: ``InputError`` for an unknown method, device file, split or data set, and for what does not fit.
    """

    def __init__(self, config: FederatedConfig) -> None:
        self.config = config
        self._recipes = {name: parse_federated_recipe(name) for name in config.ways}
        self._fleet = load_fleet(config.devices, config.clients)
        Split.parse(config.split)  # a wrong one is refused before data are read
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
    count = workers_of(setup.config)
    return Here(setup.compute) if count == 1 else Pool(setup.config, setup.seed, count)
