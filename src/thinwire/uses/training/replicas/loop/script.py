"""Local steps in a loop of one's own: one line behind the optimiser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from thinwire.links.mesh import Peer
from thinwire.types import InputError, require
from thinwire.uses.training.replicas.assembly import Adaptation, difference_synchroniser
from thinwire.uses.training.replicas.choosing.replica_policy import ReplicaPolicy
from thinwire.uses.training.replicas.ddp_hook import Origin
from thinwire.uses.training.replicas.exchange_methods import Differences, Method
from thinwire.uses.training.replicas.loop.between_sites import Exchanging, Led
from thinwire.uses.training.replicas.loop.course import Course
from thinwire.uses.training.replicas.loop.inside_site import ENDED, InsideSite, InStep
from thinwire.uses.training.replicas.loop.replica_start import Start, agree
from thinwire.uses.training.replicas.loop.shared_buffers import SharedBuffers
from thinwire.uses.training.replicas.loop.shared_training import SharedTraining
from thinwire.uses.training.replicas.loop.stepped import SteppedModel, plain, stepped_by
from thinwire.uses.training.replicas.networks import over_mesh, place_among
from thinwire.uses.training.replicas.recipes import EXCHANGE, parse_replica_recipe


def local_steps(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    recipe: str = "auto",
    *,
    peers: Mapping[int, Peer] | None = None,
    site: dist.ProcessGroup | None = None,
    steps: int = 0,
    deadline: float = 60.0,
) -> SharedTraining:
    """Keep ``model`` together with those of the ``peers``, by what ``recipe`` sends after some of its steps.

    The loop stays as it is: a step of ``optimizer`` is a local step, and what is due is exchanged behind it.

    - ``optimizer``: whatever steps the model. Of several, the last one counts the steps;
    - ``recipe``: one of replicas that exchanges differences of parameters;
    - ``peers``: links of ``meet`` or ``connect_mesh`` to all other replicas, for this model alone;
    - ``site``: a torch group of the processes of this site, where several step alike, as under
      ``DistributedDataParallel``. Its rank 0 has the ``peers``, one at each other site, and the others none;
    - ``steps``: how many the run will take, where that is known;
    - ``deadline``: seconds without any data after which a wait for a replica fails.

    What the optimiser steps is exchanged, on its device: no frozen parameters, tied ones once, and of sharded
    ones (``DTensor``) this process's shard. All replicas call this before the first step, with the same
    weights::

        peers = thinwire.meet("first.example.org:7400", rank=0, replicas=2, token=token)
        with thinwire.local_steps(model, optimizer, peers=peers) as training:
            for batch in batches:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
            training.drain()  # also before an evaluation or a checkpoint: all replicas have the same bits

    Errors: ``InputError``, one sentence, for what cannot be exchanged so, or a replica whose model differs.
    Later, out of ``step``: ``LinkError`` naming a replica that is lost or silent.
    """
    optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    parsed = parse_replica_recipe(recipe)
    method = _differences(recipe, parsed.schemes[EXCHANGE])
    stepped = stepped_by(model, [plain(one) for one in optimizers])
    inside = InsideSite(site, stepped.device) if site is not None else None
    try:
        if inside is None or inside.leads:
            return _exchanging(stepped, method, parsed.policy, peers or {}, inside, steps, deadline)
        require(
            not peers, InputError, "only rank 0 of a site's group takes peers; leave them out on the others"
        )
        return SharedTraining(stepped, Led(inside, model, stepped.held), Origin(-1, 0, str(method), {}))
    except BaseException:
        stepped.free()
        if inside is not None and inside.leads:
            inside.tell(ENDED, [])  # the others hear of it behind their first step
        raise


def _exchanging(
    stepped: SteppedModel,
    method: Differences,
    policy: ReplicaPolicy | None,
    peers: Mapping[int, Peer],
    inside: InsideSite | None,
    steps: int,
    deadline: float,
) -> SharedTraining:
    """Return what exchanges with the peers, once all have said that they begin alike."""
    require(len(peers) > 0, InputError, "there is nobody to train with; give peers of thinwire.meet")
    rank, ranks = place_among(peers), len(peers) + 1
    what = f"{method} {policy}" if policy else str(method)
    network = over_mesh(rank, peers, deadline=deadline)
    start = Start.of(stepped, what, ranks)
    agree(network, start)
    plan = None if policy is None else Adaptation(_in_step(policy, stepped), steps)
    synchroniser = difference_synchroniser(method, stepped.groups, network, plan)
    buffers = SharedBuffers(stepped.model, network)
    course = Course(network, stepped.optimizers)
    between = Exchanging(synchroniser, buffers, course, stepped.held, inside)
    return SharedTraining(stepped, between, Origin(rank, ranks, what, start.parameters))


def _in_step(policy: ReplicaPolicy, stepped: SteppedModel) -> ReplicaPolicy:
    """Return a policy that decides alike at all processes that have parts of one model."""
    world = dist.group.WORLD if stepped.is_sharded and dist.is_initialized() else None
    return policy if world is None or world.size() == 1 else InStep(policy, world, stepped.device)


def _differences(recipe: str, method: Method) -> Differences:
    """Return the method of a recipe. Errors: ``InputError`` unless it exchanges differences."""
    if not isinstance(method, Differences):
        text = f"{recipe!r} exchanges gradients, which belong behind thinwire.replicate"
        raise InputError(f"{text}; choose a recipe of differences, such as auto, thinwire or sparseloco")
    return method
