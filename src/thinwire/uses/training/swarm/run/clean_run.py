"""The run beside a swarm: members that all stay and none of which lies, one after another in this process."""

from __future__ import annotations

import math
from statistics import median

from thinwire.rounds.aggregation_server import Accepted
from thinwire.rounds.client_profile import ClientProfile
from thinwire.types import ThinwireError, require
from thinwire.uses.training.swarm.local_adamw import LocalAdamW
from thinwire.uses.training.swarm.member import MOST_STEPS, SharedBlocks, SwarmMember
from thinwire.uses.training.swarm.run.keeper_program import Keeper
from thinwire.uses.training.swarm.run.member_program import new_member
from thinwire.uses.training.swarm.run.options import SwarmConfig
from thinwire.uses.training.swarm.run.record import SwarmRecord


def clean_loss(config: SwarmConfig, record: SwarmRecord, members: int) -> float | None:
    """Return the held-out loss once as many samples counted as in ``record``; None for no samples.

    ``members``: how many, each as fast as the median of those that told the truth, and on such a link.
    """
    there = [m for m in record.members if m.rounds and m.weight and m.step_seconds]
    samples = int(record.totals["counted"])
    if not there or not samples:
        return None
    step = median(m.step_seconds for m in there if m.step_seconds)
    rate = median(m.sends or math.inf for m in there)
    keeper = Keeper(config.replace(judge=False, resume=False), lambda line, loss: None, lambda text: None)
    server, seen = keeper.server, 0
    own = [_member(keeper, config, i) for i in range(members)]
    for member in own:
        server.join(ClientProfile(member.id, step, MOST_STEPS * config.batch, rate, rate))
    while seen < samples:
        server.begin([member.id for member in own])
        for member in own:
            version = server.issue(member.id, None, member.sequence)
            found = server.receive(member.id, member.train(version, start=server.given).pack())
            taken = isinstance(found, Accepted)
            require(taken, ThinwireError, f"the run beside the swarm refused an update: {found}")
            seen += member.data.samples
    worth = keeper.taught.heldout
    return worth(server.weights) if worth is not None else None


def _member(keeper: Keeper, config: SwarmConfig, number: int) -> SwarmMember:
    taught, blocks = keeper.taught, SharedBlocks(config.batch, config.seq, 1 << 40)
    local = LocalAdamW(weight_decay=config.weight_decay, clip=config.grad_clip)
    return new_member(number, taught.model, blocks, local, taught.parameters, taught.compute, config.seed)
