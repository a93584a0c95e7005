"""A second machine that stands ready: it keeps what a keeper keeps, round by round, to go on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.files.checkpoint import write_checkpoint
from thinwire.links.address import Address
from thinwire.links.hub.spoke import Spoke
from thinwire.links.security import read_token
from thinwire.rounds.remote.control_messages import whole
from thinwire.rounds.remote.remote_client import RemoteClient
from thinwire.rounds.remote.shadow import Shadow
from thinwire.types import InputError, require
from thinwire.uses.training.swarm.run.keeper_program import STATE, Keeper
from thinwire.uses.training.swarm.run.options import PORT, SwarmConfig


def stand_by(config: SwarmConfig, noted: Callable[[str], object]) -> int:
    """Follow the keeper at ``standby`` into ``OUT``, from which ``--resume`` goes on; return its last round.

    Errors: ``InputError`` where that keeper has another model; ``LinkError`` once it is silent.
    """
    server, out = Keeper(config, lambda *_: None, noted).server, Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    place = Address.parse(config.standby, "the keeper", like=PORT, port=PORT)
    spoke = Spoke.connect(*place, token=read_token(config.token_file))
    try:
        theirs = whole(RemoteClient(spoke, config.patience, noted).terms(), "values")
        values = server.weights.numel()
        wrong = f"the keeper at {place} trains {theirs} values, and this model has {values}; give the same"
        require(theirs == values, InputError, wrong)

        def kept(number: int, row: Tensor, words: Mapping[str, Any]) -> None:
            write_checkpoint(out / STATE, server.state_at(number, row, words), {})
            noted(f"holds round {number}")

        return Shadow(spoke, values, kept, config.patience).run()
    finally:
        spoke.close()
