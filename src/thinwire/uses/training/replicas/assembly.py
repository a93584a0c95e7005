"""Make the synchroniser of a method over a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.channels.channel import Scheme
from thinwire.choosing.difference_codes import Sides
from thinwire.codecs import Codec, DeadZone, Entropy, Factors, Raw
from thinwire.codecs.deadzone import step_for
from thinwire.collectives import Reduction
from thinwire.uses.training.replicas.choosing.replica_policy import (
    ReplicaChoice,
    ReplicaPolicy,
    ReplicaSite,
)
from thinwire.uses.training.replicas.coder import Coder
from thinwire.uses.training.replicas.controller import AdaptiveController, Controller
from thinwire.uses.training.replicas.exchange_methods import (
    AllReduce,
    Differences,
    Gradients,
    Method,
    largest,
)
from thinwire.uses.training.replicas.flat_parameters import FlatParameters
from thinwire.uses.training.replicas.local_steps import Fragment, LocalSteps
from thinwire.uses.training.replicas.networks import Network
from thinwire.uses.training.replicas.synchroniser import (
    DelayedGradients,
    SummedGradients,
    Synchroniser,
)
from thinwire.uses.training.replicas.transport import ReplicaTally, Transport


def synchroniser_of(
    method: Method, parameters: Mapping[str, Tensor], network: Network, plan: Adaptation | None = None
) -> Synchroniser:
    """Return what keeps ``parameters``, by name in the order of layers, together with other replicas'.

    Every rank calls this with the same method and plan, and parameters of the same names and shapes.
    """
    if isinstance(method, Differences):
        return difference_synchroniser(method, [parameters], network, plan)
    return gradient_synchroniser(method, FlatParameters(parameters), network, plan)


def difference_synchroniser(
    method: Differences,
    groups: Sequence[Mapping[str, Tensor]],
    network: Network,
    plan: Adaptation | None = None,
) -> LocalSteps:
    """Return what exchanges the differences of parameters; those of a group are cut and coded together."""
    return LocalSteps(_fragments(method, groups, network, plan))


def gradient_synchroniser(
    method: AllReduce | Gradients,
    flat: FlatParameters,
    network: Network,
    plan: Adaptation | None = None,
    skips: bool = False,
    undoable: bool = False,
) -> Synchroniser:
    """Return what exchanges the gradients of ``flat``; ``skips`` and so on as for ``DelayedGradients``."""
    tally = ReplicaTally()
    if isinstance(method, AllReduce):
        dtype = getattr(torch, method.dtype)
        return SummedGradients(flat, network.sums("sum"), tally, dtype, network.deadline, skips)
    sums, late = network.sums("exact") if method.exact else None, method.staleness
    transport, coder = _ends(method.scheme, flat, network, tally, "gradients", late, 1, plan, sums)
    return DelayedGradients(flat, coder, transport, method.exact, skips, undoable)


def _fragments(
    method: Differences,
    groups: Sequence[Mapping[str, Tensor]],
    network: Network,
    plan: Adaptation | None,
) -> list[Fragment]:
    parts = [part for group in groups for part in cut(group, method.fragments)]
    fragments, tally = [], ReplicaTally()
    for k, part in enumerate(parts):
        flat = FlatParameters(part)
        transport, coder = _ends(
            method.scheme, flat, network, tally, f"fragment{k}", method.late, method.every, plan
        )
        first = transport.controller.local_steps * (k + 1) // len(parts)
        fragments.append(Fragment(flat, coder, transport, method, first))
    return fragments


def _ends(
    scheme: Scheme,
    flat: FlatParameters,
    network: Network,
    tally: ReplicaTally,
    name: str,
    staleness: int,
    local_steps: int,
    plan: Adaptation | None,
    sums: Reduction | None = None,
) -> tuple[Transport, Coder]:
    exchange = network.messages(name)
    controller = Controller(staleness, local_steps)
    if plan is not None:
        controller = AdaptiveController(
            plan.policy,
            plan.coded,
            network.link,
            exchange.rank,
            exchange.ranks,
            _site(flat, len(exchange.ranks), network, plan),
        )
    transport = Transport(exchange, controller, tally, network.deadline, sums)
    return transport, Coder(scheme, flat.shape, tally, flat.device, flat.matrices)


def _site(flat: FlatParameters, replicas: int, network: Network, plan: Adaptation) -> ReplicaSite:
    """Return this rank's site with nothing measured yet."""
    sides = Sides.of(flat.matrices, flat.numel)
    return ReplicaSite(flat.numel, replicas, steps=plan.steps, sides=sides, restarts=network.restarts)


def cut(parameters: Mapping[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Cut parameters, in their order, into at most ``parts`` of about as many values each.

    >>> [list(part) for part in cut({k: torch.zeros(2) for k in "abcd"}, 2)]
    [['a', 'b'], ['c', 'd']]
    """
    total, done = sum(p.numel() for p in parameters.values()), 0
    out: list[dict[str, Tensor]] = [{} for _ in range(parts)]
    for name, p in parameters.items():
        out[min(parts - 1, done * parts // max(1, total))][name] = p
        done += p.numel()
    return [part for part in out if part]


@dataclass(frozen=True)
class Adaptation:
    """The policy that changes how a method exchanges, over ``steps``; 0: nobody knows how many."""

    policy: ReplicaPolicy
    steps: int = 0
    coded: Callable[[ReplicaChoice], Codec] = field(default=lambda choice: codec_of(choice))


def codec_of(choice: ReplicaChoice) -> Codec:
    """Return the codec of a choice: the largest values, a dead zone, factors, or values as they are."""
    if choice.ratio is not None:
        return largest(choice.ratio)
    if choice.rank is not None:
        return Entropy(Factors(choice.rank))
    return Raw() if choice.bits is None else Entropy(DeadZone(step_for(choice.bits)))
