"""A branch's program: members join it as they would join the keeper, and the keeper sees one member."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.links.hub.hub import Hub
from thinwire.links.security import read_token
from thinwire.rounds.client_profile import ClientPace, ClientProfile
from thinwire.rounds.remote.branch import Branch, BranchServer
from thinwire.rounds.remote.remote_client import RemoteClient
from thinwire.runs.machine import devices
from thinwire.runs.machine.compute import Compute
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.options import COUNTED
from thinwire.types import InputError, PayloadError, require
from thinwire.uses.training.run.training_job import read_texts
from thinwire.uses.training.swarm.choosing.swarm_policy import Together
from thinwire.uses.training.swarm.kit import kit_digest, pack_kit
from thinwire.uses.training.swarm.passed_share import HELD, PassedShare
from thinwire.uses.training.swarm.run.keeper_program import Keeper
from thinwire.uses.training.swarm.run.member_program import SwarmTerms, at_any, called, fetched
from thinwire.uses.training.swarm.run.options import SwarmConfig
from thinwire.uses.training.swarm.run.swarm_model import Evaluator, build_whole, kept_kit
from thinwire.uses.training.swarm.run.swarm_recorder import Told
from thinwire.uses.training.swarm.run.taught import Taught

OF_ABOVE = ("client", "signature", "swarm", "values")  # terms that each server says itself


def open_branch(config: SwarmConfig, told: Told, noted: Callable[[str], object]) -> BranchKeeper:
    """Return a branch of the keeper ``under`` whose address it is, with that keeper's model and terms.

    Errors: ``InputError`` where these cannot be; ``LinkError`` naming the keeper.
    """
    require(bool(config.under), InputError, "a branch needs the address of the keeper above; give --under")

    def read(remote: RemoteClient, given: dict[str, Any], peer: str) -> tuple[dict[str, Any], ModelSource]:
        return given, fetched(remote, SwarmTerms.read(given))

    token = read_token(config.token_file)
    given, source = at_any(config.above, token, config.patience, noted, "", read)
    terms = SwarmTerms.read(given)
    folder = kept_kit(terms.kit)
    kit = pack_kit(folder)
    same = kit_digest(kit) == terms.kit
    require(same, PayloadError, f"the model's kit in {folder} is not as it came; delete that folder")
    config = config.replace(
        model=str(folder), init=None if terms.weights else "random", rounds=COUNTED, save_model=False,
        **{name: getattr(terms, name) for name in ("seq", "batch", "lora", "seed", "own_data")},
    )  # fmt: skip
    compute = Compute.of(devices.own(config.device), config.dtype)
    model = build_whole(source, terms.lora, terms.seed, compute)
    held = 0 if terms.own_data else HELD
    share = PassedShare(terms.batch, source.config.vocab_size, held)
    passed = {name: value for name, value in given.items() if name not in OF_ABOVE}
    taught = Taught(model, compute, share, kit=kit, terms=passed)
    taught.losses = Evaluator(model, taught.parameters, compute).losses
    if terms.own_data:
        taught.scored = read_texts(config, trial=False).heldout[:HELD]
    return BranchKeeper(config, told, noted, taught)


class BranchKeeper(Keeper):
    """Keep members for the keeper above; made by ``open_branch``.

    Updates are scored on samples of the branch's first share, which go back up and which others train on;
    where members have data of their own, on the branch's.
    """

    def __init__(
        self, config: SwarmConfig, told: Told, noted: Callable[[str], object], taught: Taught
    ) -> None:
        super().__init__(config, told, noted, taught)
        self.above = self.branch = Branch(taught.model, self._own, taught.parameters, self._together)
        self._name = called(config.name)

    def _server(self) -> BranchServer:
        share = self.taught.work
        require(isinstance(share, PassedShare), InputError, "a branch divides the share that it is given")
        self._own = BranchServer(self.taught.parameters, self._divided, share, self._judge())  # type: ignore[arg-type]
        return self._own

    def _together(self, members: Sequence[ClientProfile]) -> ClientPace:
        return self._policy.pace(members, self.taught.parameters.numel)

    def _divided(self, steps: int) -> Together:
        return dataclasses.replace(self._policy, together=steps)

    def run(self, announce: Callable[[Hub], object]) -> None:
        """Listen, and go on until the keeper above has its last round. Errors: ``LinkError``."""
        threading.Thread(target=self._follow, name="branch", daemon=True).start()
        try:
            super().run(announce)
        finally:
            self.branch.stop()

    def _follow(self) -> None:
        """Listen to the keeper above, once members are there."""
        self.branch.begun.wait()
        token, patience = read_token(self.config.token_file), self.config.patience
        try:
            at_any(self.config.above, token, patience, self._noted, self._name, self._serve)
            self.branch.close()
        except BaseException as e:
            self.branch.close(e)

    def _serve(self, remote: RemoteClient, terms: Mapping[str, Any], peer: str) -> int:
        self.branch.id = SwarmTerms.read(terms).client
        self._noted(f"{self._name} is a branch of {peer}")
        return remote.serve(self.branch, self.branch.pace())

    def _paced(self) -> float:
        """Return the longest that the round may last: the keeper above waits for what it comes to."""
        if self.server.judge is None and self.config.judge:
            self.taught.scored = self._own.share.heldout
            self.server.judge = self._judge()
        return min(super()._paced(), self.branch.seconds())

    def _keep(self) -> None:
        """Nothing: what a branch knows is at the keeper above."""
