"""A federation on a port: the server of real clients, its record, and how it goes on after a crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from thinwire.engines.federated.conductor import Made
from thinwire.engines.federated.journal import WitnessedServer
from thinwire.engines.federated.method import Method
from thinwire.engines.federated.rates import Decay
from thinwire.engines.federated.remote.host import Host
from thinwire.engines.federated.server import Server
from thinwire.lab.federated.machines import ServeConfig
from thinwire.lab.federated.models import build_model
from thinwire.lab.federated.recorder import Recorder, Told, with_steps
from thinwire.lab.federated.setup import Setup
from thinwire.lab.federated.tasks import load_dataset
from thinwire.lab.records.schema import status_of
from thinwire.links.hub.hub import Hub
from thinwire.links.security import read_token
from thinwire.recipes.federated import METHOD, parse_federated_recipe
from thinwire.replacing import replacing
from thinwire.types import InputError, require

STATE = "server.safetensors"
FAREWELL = 10.0  # seconds for the last word to reach all clients


class Serving:
    """One server: ``run`` goes on until the last version. ``journal``: keep what happened, to do it again."""

    def __init__(
        self,
        config: ServeConfig,
        told: Told,
        noted: Callable[[str], object],
        journal: bool = False,
        every: int = 0,
    ) -> None:
        self.config, self._noted = config, noted
        name, seed = config.ways[0], config.every_seed[0]
        recipe = parse_federated_recipe(name)
        self.method: Method = recipe.schemes[METHOD]
        data = load_dataset(config.data)
        self.setup = Setup(config, seed, data, (), build_model(config.model, data.shape, data.classes, seed))
        kind = WitnessedServer if journal else Server
        policy = with_steps(recipe.policy, name, config.steps)
        rates = Decay(config.lr, config.decay, config.rounds)
        self.server = kind(self.setup.weights, self.method.rule, policy, self.method.download, rates)
        self.wire: dict[str, int] = {}  # bytes over the hub's sockets, once it has ended
        self._state = Path(config.out) / STATE
        if config.resume:
            self._resume()
        folder = Path(config.out)
        self.recorder = Recorder(self.setup, name, recipe.spec, self.server, folder, told, every)

    def run(self, announce: Callable[[Hub], object]) -> None:
        """Listen, say where, and serve until the last version. Errors: ``LinkError`` naming the clients."""
        config = self.config
        token = read_token(config.token_file)
        hub = Hub.bind(config.host, config.port, token=token)
        host = Host(
            self.server,
            hub,
            self.terms(),
            self._made,
            expected=config.clients,
            participate=config.participate,
            seed=self.setup.seed,
            gather=config.gather,
            deadline=config.deadline,
            noted=self._noted,
        )
        status = "done"
        try:
            announce(hub)
            host.run()
        except BaseException as e:
            status = status_of(e)
            self.recorder.record.notes.append(str(e))
            raise
        finally:
            hub.close(FAREWELL)
            sent, received = hub.traffic()
            self.wire = {"up": received.nbytes, "down": sent.nbytes}
            self.recorder.close(status, host.now, host.local_steps, host.refused)

    def terms(self) -> dict[str, Any]:
        """Return what clients are told."""
        config, data = self.config, self.setup.data
        return {
            "method": config.ways[0],
            "model": config.model,
            "shape": list(data.shape),
            "classes": data.classes,
            "values": self.setup.values,
            "batch": config.batch,
            "seed": self.setup.seed,
            "feedback": self.method.feedback,
        }

    def _made(self, made: Made) -> bool:
        going = self.recorder.made(made)
        with replacing(self._state) as part:
            save_file({k: x.contiguous() for k, x in self.server.state_dict().items()}, part)
        return going

    def _resume(self) -> None:
        try:
            state = load_file(self._state)
        except FileNotFoundError as e:
            raise InputError(f"there is no {self._state} to go on from; leave --resume out") from e
        except (OSError, SafetensorError) as e:
            raise InputError(f"cannot read {self._state} ({e}); leave --resume out to begin anew") from e
        self.server.load_state_dict(state)
        done = self.server.version < self.config.rounds
        wrong = (
            f"{self._state} is of version {self.server.version} of {self.config.rounds}; give more --rounds"
        )
        require(done, InputError, wrong)
