"""Replicas in a script of one's own: one line behind ``DistributedDataParallel``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

from thinwire.channels.memory import NoMemory
from thinwire.choosing.registry import Parameter, Registry
from thinwire.links.mesh import Peer
from thinwire.types import InputError, require
from thinwire.uses.training.replicas import ddp_hook
from thinwire.uses.training.replicas.assembly import Adaptation, gradient_synchroniser
from thinwire.uses.training.replicas.choosing.replica_policy import ReplicaPolicy
from thinwire.uses.training.replicas.ddp_hook import (
    Buckets,
    HookTerms,
    Origin,
    Replicated,
    check_free,
    digest_of_weights,
    hook,
    trained,
)
from thinwire.uses.training.replicas.ddp_site import DdpSite, SiteLeader, SiteMember
from thinwire.uses.training.replicas.exchange_methods import AllReduce, Differences, Gradients, Method
from thinwire.uses.training.replicas.flat_parameters import FlatParameters
from thinwire.uses.training.replicas.networks import Network, over_group, over_mesh, place_among
from thinwire.uses.training.replicas.power_sgd import PowerReplicated, PowerSgd
from thinwire.uses.training.replicas.recipes import EXCHANGE, parse_replica_recipe

EXACT_STATIC = 3  # exact passes with static_graph=True
OTHER = "exchanges other parameters, or by another recipe,"
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
    return _install(ddp, method, policy, peers, group, scaler, site, deadline)


def _install(
    ddp: DistributedDataParallel,
    method: Method | PowerSgd,
    policy: ReplicaPolicy | None,
    peers: Mapping[int, Peer] | None,
    group: dist.ProcessGroup | None,
    scaler: torch.amp.GradScaler | None,
    site: bool,
    deadline: float,
) -> Replicated:
    """Give a DDP model its hook, once all ranks have said that theirs is the same."""
    ddp = getattr(ddp, "_orig_mod", ddp)  # of what torch.compile made
    check_free(ddp)
    if isinstance(method, PowerSgd):
        text = "powersgd averages over all ranks of DDP's group at once; leave site out, or choose topk"
        require(not site, InputError, text)
        return _install_power(ddp, method, peers, group)
    _check_network(ddp, peers, group, site)
    if isinstance(method, Differences):
        raise InputError(
            "this recipe exchanges differences of parameters after local steps, which belong to a trainer's "
            "loop, not to a hook; choose one of gradients, such as deco, dd-ef-sgd or topk"
        )
    keeps = isinstance(method, Gradients) and (method.staleness > 0 or method.scheme.memory != NoMemory())
    wrong = (
        "find_unused_parameters=True loses what is late or kept back for a parameter that a step leaves out"
    )
    fits = not ddp.find_unused_parameters or not (keeps or policy)
    require(fits, InputError, f"{wrong}; build the model without it, or exchange at once and without memory")
    recipe = f"{method} {policy}" if policy else str(method)
    if isinstance(method, Gradients):
        exact = EXACT_STATIC if ddp.static_graph else ddp_hook.EXACT
        method = replace(method, exact=max(method.exact, exact))
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    inside = DdpSite(ddp) if site else None
    buckets = Buckets(trained(ddp), scaler, inside.average if inside else None)
    what = f"{buckets.digest} {method} {policy} {scaler is None}"
    weights = digest_of_weights(ddp)
    _check_alike(ddp, what if site else f"{what} {peers is None}", OTHER)
    _check_alike(ddp, weights, "starts from other weights")
    late = policy is not None or (isinstance(method, Gradients) and method.staleness > 0)
    broadcasts = late and not site and ddp.broadcast_buffers
    terms = HookTerms(_origin(ddp, recipe, peers, site, buckets.described), bool(keeps or policy), broadcasts)
    replicated: Replicated
    if inside is not None and not inside.leads:
        replicated = SiteMember(ddp, buckets, terms, scaler, inside)
    else:
        network = _network(ddp, method, policy, peers, group, buckets, site, deadline)
        if inside is not None:
            inside.meet(network, what, weights)
        replicated = _replicated(ddp, method, policy, network, buckets, inside, terms, scaler)
    if broadcasts:
        ddp.broadcast_buffers = False  # before each forward pass, it would wait for rank 0
    ddp.register_comm_hook(replicated, hook)
    return replicated


def _origin(
    ddp: DistributedDataParallel,
    recipe: str,
    peers: Mapping[int, Peer] | None,
    site: bool,
    described: dict[str, str],
) -> Origin:
    rank, ranks = ddp.process_group.rank(), ddp.process_group.size()
    if site and peers is not None:
        rank, ranks = place_among(peers), len(peers) + 1
    return Origin(rank, ranks, recipe, described)


def _replicated(
    ddp: DistributedDataParallel,
    method: AllReduce | Gradients,
    policy: ReplicaPolicy | None,
    network: Network,
    buckets: Buckets,
    site: DdpSite | None,
    terms: HookTerms,
    scaler: torch.amp.GradScaler | None,
) -> Replicated:
    plan = None if policy is None else Adaptation(policy)
    synchroniser = gradient_synchroniser(method, buckets, network, plan, scaler is not None, terms.undoes)
    if site is None:
        return Replicated(ddp, buckets, synchroniser, terms, scaler)
    return SiteLeader(ddp, buckets, synchroniser, terms, scaler, site)


def _check_network(
    ddp: DistributedDataParallel,
    peers: Mapping[int, Peer] | None,
    group: dist.ProcessGroup | None,
    site: bool,
) -> None:
    if site:
        leads = ddp.process_group.rank() == 0
        text = "rank 0 of a site's group takes peers of connect_mesh, to rank 0 of each other site"
        text += ", and no other rank takes any"
        require((peers is not None) == leads and group is None, InputError, text)
        return
    one = (peers is None) != (group is None)
    text = "replicas need a network; give peers of connect_mesh, or a torch group, not both"
    require(one, InputError, text)


def _install_power(
    ddp: DistributedDataParallel, method: PowerSgd, peers: object, group: dist.ProcessGroup | None
) -> Replicated:
    require(
        peers is None, InputError, "powersgd averages over a torch group; give group, or nothing, not peers"
    )
    buckets = Buckets(trained(ddp), None)
    text = "powersgd takes no parameters that are complex, empty or without a dimension; choose topk"
    odd = any(p.is_complex() or not p.numel() or not p.dim() for p in buckets.trained)
    require(not odd, InputError, text)
    _check_alike(ddp, f"{buckets.digest} {method}", OTHER)
    _check_alike(ddp, digest_of_weights(ddp), "starts from other weights")
    state = power.PowerSGDState(group or ddp.process_group, method.rank, method.start)
    terms = HookTerms(
        _origin(ddp, str(method), None, False, buckets.described), undoes=True, broadcasts=False
    )
    replicated = PowerReplicated(ddp, buckets, state, terms)
    ddp.register_comm_hook(replicated, hook)
    return replicated


def _check_alike(ddp: DistributedDataParallel, what: str, differs: str) -> None:
    """Raise ``InputError`` unless all ranks say the same."""
    digest = list(hashlib.blake2b(what.encode(), digest_size=16).digest())
    own = torch.tensor(digest, dtype=torch.uint8, device=next(ddp.module.parameters()).device)
    others = [torch.empty_like(own) for _ in range(ddp.process_group.size())]
    dist.all_gather(others, own, group=ddp.process_group)
    wrong = [rank for rank, other in enumerate(others) if not torch.equal(own, other)]
    text = f"rank {wrong} {differs} than rank {ddp.process_group.rank()}; give all ranks the same"
    require(not wrong, InputError, text)


def _network(
    ddp: DistributedDataParallel,
    method: AllReduce | Gradients,
    policy: ReplicaPolicy | None,
    peers: Mapping[int, Peer] | None,
    group: dist.ProcessGroup | None,
    flat: FlatParameters,
    sites: bool,
    deadline: float,
) -> Network:
    many = ddp.process_group.size()
    if group is None:
        peers = peers or {}
        many = len(peers) + 1 if sites else many
        wrong = (
            f"{len(peers)} peers are not the {many - 1} other replicas; connect all ranks of DDP, no others"
        )
        require(len(peers) == many - 1, InputError, wrong)
        return over_mesh(place_among(peers), peers, deadline=deadline)
    wrong = f"a group of {group.size()} ranks is not DDP's {many}; make one of all by new_group"
    require(group.size() == many, InputError, wrong)
    wrong = "DDP's own group is taken; make another for the hook by new_group(backend='gloo')"
    require(group is not ddp.process_group, InputError, wrong)
    if isinstance(method, AllReduce):
        wrong = "plain averages over a torch group are what DDP makes without a hook"
        raise InputError(f"{wrong}; leave it out")
    wrong = "this recipe follows the link, of which a torch group tells nothing"
    require(policy is None, InputError, f"{wrong}; give peers of connect_mesh, or choose dd-ef-sgd or topk")
    return over_group(group, method.scheme, flat, deadline)
