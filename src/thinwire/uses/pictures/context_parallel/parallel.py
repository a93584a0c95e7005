"""Take a transformer apart over the ranks of a mesh, once all of them have said that theirs is the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import nn

from thinwire.links.mesh import Peer
from thinwire.types import InputError, require
from thinwire.uses.pictures.absent_block import (
    check_part,
    facts_of,
    part_of,
    under_of,
)
from thinwire.uses.pictures.agreement import (
    Parallel,
    agree,
    check_whole,
    drawing_alike,
    facts,
    own_rank,
    refused,
    state_of,
    told,
    used,
)
from thinwire.uses.pictures.coding import Coding
from thinwire.uses.pictures.context_parallel.attention import (
    DisplacedAttention,
    GatheredAttention,
    UlyssesAttention,
)
from thinwire.uses.pictures.context_parallel.guidance import GuidanceParallel
from thinwire.uses.pictures.context_parallel.latent import LatentParallel
from thinwire.uses.pictures.context_parallel.modes import Batch, Division, ParallelMode
from thinwire.uses.pictures.context_parallel.pipefusion import PipeFusion
from thinwire.uses.pictures.diffusers_names.plans import SplitPlan
from thinwire.uses.pictures.short_turns import short_turns
from thinwire.uses.pictures.weight_checksums import WatchedWeights

ONE, BATCH = "one", "batch"  # each rank computes everything, or pictures of its own
MODES: dict[str, type[ParallelMode]] = {
    "gather": GatheredAttention,
    "displaced": DisplacedAttention,
    "ulysses": UlyssesAttention,
    "guidance": GuidanceParallel,
    BATCH: Batch,
    "pipe": PipeFusion,
    "latent": LatentParallel,
}


@contextmanager
def over_ranks(
    model: nn.Module,
    peers: Mapping[int, Peer],
    attention: Coding,
    output: Coding,
    division: Division | None = None,
    deadline: float = 60.0,
    plan: SplitPlan | None = None,
) -> Iterator[Parallel]:
    """Run ``model`` over this rank and ``peers`` inside the block; see ``thinwire.parallel``."""
    division = division or Division()
    mode, known = division.mode, (*MODES, ONE)
    with refused(peers, "diffusion"):
        text = f"there is no mode {mode!r}; choose {', '.join(known[:-1])} or {ONE}"
        require(mode in known, InputError, text)
        if part_of(model) is not None:
            check_part(model, mode, own_rank(peers), len(peers) + 1)
    if mode == ONE or not peers:
        yield Parallel(ONE)
        return
    with used(peers, "diffusion") as exchange, ExitStack() as undo:
        with told(exchange):
            check_whole(model)
            session = MODES[mode](exchange, attention, output, division, deadline)
            undo.push(lambda kind, error, trace: session.leave(error))
            undo.enter_context(session.attached(model, plan))
            under = under_of(model)
            recipe = {"mode": mode, "division": division, "attention": attention, "output": output}
            weights = WatchedWeights(model, under)
            own = facts_of(model) | facts(model, recipe, weights.checksum(False), under)
            own["its plan (a checksum)"] = str(zlib.crc32(repr(plan).encode()))
            drawn = None if mode == BATCH else state_of(model)
            first = agree(exchange, own, deadline, drawn=drawn)
            session.watch(weights)
        undo.enter_context(drawing_alike(model, drawn, first))
        undo.enter_context(short_turns(model))
        yield Parallel(mode, session)
