"""A federation on a port: the server of real clients, its record, and how it goes on after a crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.files.checkpoint import read_checkpoint, write_checkpoint
from thinwire.links.hub.hub import Hub
from thinwire.links.security import read_token
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client_scheduler import MadeVersion
from thinwire.rounds.journal import WitnessedServer
from thinwire.rounds.parameters import Parameters
from thinwire.rounds.remote.remote_server import RemoteServer
from thinwire.runs.records.run_record import status_of
from thinwire.types import InputError, require
from thinwire.uses.federated.recipes import METHOD, Method, parse_federated_recipe
from thinwire.uses.federated.run.datasets import load_dataset
from thinwire.uses.federated.run.federated_recorder import FederatedRecorder, Told, new_server
from thinwire.uses.federated.run.federated_setup import Setup
from thinwire.uses.federated.run.options import ServeConfig

STATE, MODEL = "server.safetensors", "model.safetensors"
RESUMED = "It went on from version {}; times, points and refusals of before are not in this record."


class FederationServer:
    """One server: ``run`` goes on until the last version. ``journal``: keep what happened, to do it again."""

    def __init__(
        self, config: ServeConfig, told: Told, noted: Callable[[str], object], journal: bool = False
    ) -> None:
        self.config, self._told, self._noted = config, told, noted
        name, seed = config.ways[0], config.every_seed[0]
        self._recipe = parse_federated_recipe(name)
        self.method: Method = self._recipe.schemes[METHOD]
        data = load_dataset(config.data)
        self.setup = Setup.alone(config, seed, data)
        kind = WitnessedServer if journal else Server
        self.server = new_server(self.setup, name, self._recipe, kind)
        self.wire: dict[str, int] = {}  # bytes over the hub's sockets, once it has ended
        self._out = Path(config.out)
        if config.resume:
            self._resume()

    def run(self, announce: Callable[[Hub], object]) -> None:
        """Listen, say where, and serve until the last version. Errors: ``LinkError`` naming the clients."""
        config = self.config
        hub = Hub.bind(config.host, config.port, token=read_token(config.token_file))
        try:
            recorder = self._open_record()
            host = self._host(hub, recorder)
            status = "failed"
            try:
                announce(hub)
                host.run()
                status = "done"
            except BaseException as e:
                status = status_of(e)
                recorder.record.notes += [str(e)] if str(e) else []
                raise
            finally:
                self._save_model()
                recorder.close(status, host.now, host.tally)
                hub.close()
                sent, received = hub.traffic()
                self.wire = {"up": received.nbytes, "down": sent.nbytes}
        finally:
            hub.close(0.0)

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

    def _open_record(self) -> FederatedRecorder:
        if not self.config.resume:  # or a later --resume would go on from another run
            (self._out / STATE).unlink(missing_ok=True)
            (self._out / MODEL).unlink(missing_ok=True)
        name, spec = self.config.ways[0], self._recipe.spec
        recorder = FederatedRecorder(self.setup, name, spec, self.server, self._out, self._told)
        if self.server.version:
            recorder.record.notes.append(RESUMED.format(self.server.version))
        return recorder

    def _host(self, hub: Hub, recorder: FederatedRecorder) -> RemoteServer:
        config = self.config

        def made(version: MadeVersion) -> bool:
            going = recorder.made(version)
            write_checkpoint(self._out / STATE, self.server.state_dict(), {})
            return going

        return RemoteServer(
            self.server,
            hub,
            self.terms(),
            made,
            expected=config.clients,
            participate=config.participate,
            seed=self.setup.seed,
            gather=config.gather,
            deadline=config.deadline,
            quorum=config.quorum,
            noted=self._noted,
        )

    def _save_model(self) -> None:
        """Write the newest version as the model's own tensors, by name."""
        model = self.setup.model
        Parameters(model).write(self.server.weights)
        notes = {"thinwire.version": str(self.server.version), "thinwire.model": self.config.model}
        write_checkpoint(self._out / MODEL, model.state_dict(), notes)

    def _resume(self) -> None:
        file = self._out / STATE
        require(file.exists(), InputError, f"there is no {file} to go on from; leave --resume out")
        self.server.resume(read_checkpoint(file))
        version, rounds = self.server.version, self.config.versions
        wrong = f"{file} is of version {version} of {rounds}; give more --rounds"
        require(version < rounds, InputError, wrong)
