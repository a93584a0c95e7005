"""The keeper of a swarm: it hands out rounds to whoever is there, and makes versions of what comes back."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from thinwire.choosing.difference_codes import Sides
from thinwire.files.checkpoint import read_checkpoint, write_checkpoint
from thinwire.links.hub.hub import Hub
from thinwire.links.security import read_token
from thinwire.rounds.aggregation import Synchronous
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client_scheduler import MadeVersion
from thinwire.rounds.download import DeltaDownload
from thinwire.rounds.judging import Judge
from thinwire.rounds.remote.branch import Branch
from thinwire.rounds.remote.matchmaking import PairRelay
from thinwire.rounds.remote.remote_server import RemoteServer
from thinwire.runs.models.folder import remove_model
from thinwire.runs.options import COUNTED
from thinwire.runs.records.run_record import status_of
from thinwire.types import InputError, require
from thinwire.uses.training.swarm.choosing.swarm_policy import Together, deadline
from thinwire.uses.training.swarm.gauntlet import Gauntlet
from thinwire.uses.training.swarm.run.options import SwarmConfig
from thinwire.uses.training.swarm.run.swarm_recorder import SwarmRecorder, Told
from thinwire.uses.training.swarm.run.taught import Taught, of_texts
from thinwire.uses.training.swarm.schedule import RoundRates

STATE = "keeper.safetensors"
RESUMED = "It went on from round {}; members and times of before are not in this record."


class Keeper:
    """One swarm: ``run`` goes on until the last round. ``taught``: what it learns, by default its texts."""

    above: Branch | None = None  # whoever says when rounds begin

    def __init__(
        self, config: SwarmConfig, told: Told, noted: Callable[[str], object], taught: Taught | None = None
    ) -> None:
        self.config, self._told, self._noted = config, told, noted
        self.taught = taught or of_texts(config)
        values = self.taught.parameters.numel
        sides = Sides.of(self.taught.parameters.matrices, values) or Sides(0, 0)
        self._policy = Together(config.local_steps, sides.total, sides.loose)
        self.server = self._server()
        self._out = Path(config.out)
        if config.resume:
            self._resume()

    def run(self, announce: Callable[[Hub], object]) -> None:
        """Listen, say where, and go on until the last round. Errors: ``LinkError`` where nobody comes."""
        config = self.config
        token = read_token(config.token_file)
        hub = Hub.bind(*config.place, token=token)
        beside = (
            hub.port + 1 if config.place.port else 0
        )  # of a port from the system, the next may be another's
        relay = PairRelay(config.place.host, config.relay_port or beside, token)
        recorder, host, status = None, None, "failed"
        try:
            recorder = self._recorder()
            host = self._host(hub, recorder, relay)
            announce(hub)
            host.run()
            status = "done"
        except BaseException as e:
            status = status_of(e)
            if recorder is not None and str(e):
                recorder.record.notes.append(str(e))
            raise
        finally:
            relay.close()
            hub.close()
            # a full disk is told once, by the first error
            with suppress(OSError) if status == "failed" else nullcontext():
                if recorder is not None and host is not None:
                    self._save_model()
                    recorder.close(status, host, host.ended, host.kit_bytes)

    def _server(self) -> Server:
        config, taught = self.config, self.taught
        rates = RoundRates(config.peak, config.warmup, config.rounds, config.lr_schedule)
        down = DeltaDownload(self._policy.download(taught.parameters.numel))
        return Server(taught.parameters, Synchronous(), self._policy, down, rates, taught.work, self._judge())

    def terms(self) -> dict[str, Any]:
        """Return what members are told."""
        return {"swarm": 1, "values": self.server.weights.numel(), **self.taught.terms}

    def _judge(self) -> Judge | None:
        """Return who weighs updates; nobody where that is not asked for, or there is nothing to score by."""
        taught = self.taught
        if not self.config.judge or taught.losses is None or taught.scored is None:
            return None
        return Gauntlet(
            taught.losses,
            taught.assigned,
            taught.scored,
            secrets.randbits(62),  # who knew it could write what looks like nothing that was sent before
            name=lambda client: self.server.names().get(client) or f"member {client}",
        )

    def _recorder(self) -> SwarmRecorder:
        if not self.config.resume:
            (self._out / STATE).unlink(missing_ok=True)
            remove_model(self._out / "model")
        notes = list(self.taught.notes)
        if self.server.version:
            notes.append(RESUMED.format(self.server.version))
        spec = f"down: {self.server.download!r}; up: {self.server.policy!r}, ErrorFeedback()"
        return SwarmRecorder(
            self.config, self.server, self._out, self.taught.heldout, spec, notes, self._told
        )

    def _host(self, hub: Hub, recorder: SwarmRecorder, relay: PairRelay) -> RemoteServer:
        def made(version: MadeVersion) -> bool:
            going = recorder.made(version, host)
            self._keep()
            return going

        host = RemoteServer(
            self.server,
            hub,
            self.terms(),
            made,
            expected=self.config.members,
            seed=self.config.seed,
            gather=self.config.gather,
            deadline=self.config.patience,
            noted=self._noted,
            seen=lambda client, here: recorder.seen(client, here, host.now),
            paced=self._paced,
            issued=recorder.evaluate,
            admits=self._admits,
            kit=self.taught.kit,
            asked_again=COUNTED,
            above=self.above,
            relay=relay.port if self.taught.kit else None,  # a half is built from the kit
        )
        return host

    def _keep(self) -> None:
        """Write what a keeper that goes on later needs."""
        write_checkpoint(self._out / STATE, self.server.state_dict(), {})

    def _paced(self) -> float:
        """Return the longest that the round which begins now may last."""
        found = self.server.assignments()
        members = [self.server.device(client) for client in found]
        return deadline(members, list(found.values()), self.server.weights.numel(), self._policy)

    def _admits(self, name: str) -> str:
        return f"{name} may not take part in this swarm" if name and name in self.config.ban else ""

    def _save_model(self) -> None:
        """Write the newest version as a model, where one is wanted and there is a way."""
        self.taught.parameters.write(self.server.weights)
        if self.config.save_model and self.server.version and self.taught.save is not None:
            folder = self._out / "model"
            folder.mkdir(parents=True, exist_ok=True)
            self.taught.save(folder)

    def _resume(self) -> None:
        file = self._out / STATE
        require(file.exists(), InputError, f"there is no {file} to go on from; leave --resume out")
        self.server.resume(read_checkpoint(file))
        version, rounds = self.server.version, self.config.rounds
        wrong = f"{file} is of round {version} of {rounds}; give more --rounds"
        require(version < rounds, InputError, wrong)
