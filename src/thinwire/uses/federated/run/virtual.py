"""One run of federated learning on the virtual clock: a method with a seed, and the record that it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from thinwire.choosing.registry import Recipe
from thinwire.runs.records.schema import status_of
from thinwire.types import ThinwireError
from thinwire.uses.federated.choosing.device import FederatedPolicy
from thinwire.uses.federated.method import Method
from thinwire.uses.federated.recipes import METHOD
from thinwire.uses.federated.residuals import Residuals
from thinwire.uses.federated.run.fleet import Fleet
from thinwire.uses.federated.run.options import FederatedConfig
from thinwire.uses.federated.run.recorder import Recorder, Told, new_server
from thinwire.uses.federated.run.setup import Setup
from thinwire.uses.federated.run.simulate import Simulation
from thinwire.uses.federated.run.trainer import Trainer

FREE = "What the server sends takes no time here, as papers assume; its bytes count."


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
        self._residuals = Residuals(method.memory)
        self._recorder = Recorder(
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
