"""Replicas in a script of one's own: one line behind ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from thinwire.choosing.registry import Parameter, Registry
from thinwire.links.mesh import Peer
from thinwire.uses.training.replicas.choosing.site import ReplicaPolicy
from thinwire.uses.training.replicas.hook import Replicated
from thinwire.uses.training.replicas.install import install
from thinwire.uses.training.replicas.method import Method
from thinwire.uses.training.replicas.power import PowerSgd
from thinwire.uses.training.replicas.recipes import EXCHANGE, parse_replica_recipe

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel


HOOKS = Registry[PowerSgd, None]("hook", ("hook",), (PowerSgd,))


@HOOKS.register("powersgd", "Matrices of low rank, by torch's own hook.", "PowerSGD, arXiv 1905.13727")
def powersgd(
    rank: Annotated[int, Parameter("the rank of the matrices that are sent", 1, 64)] = 1,
    start: Annotated[int, Parameter("how many passes are exact at first", 2, 1_000_000)] = 10,
) -> dict[str, PowerSgd]:
    """Let torch's hook average matrices of low rank with error feedback; 10 exact passes are ours."""
    return {"hook": PowerSgd(rank, start)}


def replicate(
    ddp: DistributedDataParallel,
    recipe: str = "deco",
    *,
    peers: Mapping[int, Peer] | None = None,
    group: dist.ProcessGroup | None = None,
    scaler: torch.amp.GradScaler | None = None,
    site: bool = False,
    deadline: float = 60.0,
) -> Replicated:
    """Let the gradients of ``ddp`` travel as ``recipe`` says, instead of by all-reduce.

    - ``recipe``: one of replicas that exchanges gradients, or ``powersgd``;
    - ``peers``: links of ``connect_mesh`` to all other ranks, a mesh a model; or ``group``: a gloo group of
      all ranks, for this alone, over which every message takes the most bytes that its codec may need;
    - ``scaler``: the ``GradScaler`` that scales the loss. With it, a gradient that is not finite on one rank
      makes all ranks skip the step; without, it ends all of them;
    - ``site``: DDP's own group is one site of several. It averages over that group first. Its rank 0, which
      alone has ``peers``, exchanges with rank 0 of the other sites; sites weigh by their ranks;
    - ``deadline``: seconds without any data after which a wait for a rank fails.

    All ranks call this, before the first backward pass::

        replicated = thinwire.replicate(ddp, "dd-ef-sgd:ratio=0.01,staleness=2", peers=peers)
        ...
        loss.backward()
        if replicated.ready:  # not while the first gradients are under way
            optimizer.step()
        ...
        replicated.drain(optimizer.step)  # or the function that clips, steps and schedules
        replicated.close()

    Errors: ``InputError``, one sentence, for what cannot be exchanged so. Later, out of ``backward``:
    ``LinkError`` naming a rank that is lost or silent.
    """
    method: Method | PowerSgd
    policy: ReplicaPolicy | None = None
    if recipe.strip().partition(":")[0] in HOOKS.entries:
        method = HOOKS.parse(recipe).schemes["hook"]
    else:
        parsed = parse_replica_recipe(recipe)
        method, policy = parsed.schemes[EXCHANGE], parsed.policy
    return install(ddp, method, policy, peers, group, scaler, site, deadline)
