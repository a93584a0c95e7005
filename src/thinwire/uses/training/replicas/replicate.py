"""Make the replicator of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.channels.channel import Scheme
from thinwire.codecs import ChunkTopK, Codec, DeadZone, Entropy, Raw, Uniform
from thinwire.codecs.deadzone import step_for
from thinwire.collectives import Exchange, Reduction
from thinwire.uses.training.replicas.choosing.site import ReplicaChoice, ReplicaPolicy
from thinwire.uses.training.replicas.coder import Coder
from thinwire.uses.training.replicas.differences import Fragment, LocalSteps
from thinwire.uses.training.replicas.gradients import DelayedGradients, SummedGradients
from thinwire.uses.training.replicas.mail import Mail
from thinwire.uses.training.replicas.method import AllReduce, Differences, Gradients, Method
from thinwire.uses.training.replicas.pilot import AdaptivePilot, Link, Pilot
from thinwire.uses.training.replicas.replicator import Replicator
from thinwire.uses.training.replicas.table import Table
from thinwire.uses.training.replicas.tally import Tally


@dataclass(frozen=True)
class Network:
    """How replicas reach each other: exchanges and sums by name, and what is known of this rank's link.

    ``link`` returns its rate, bytes/s, and one-way delay, seconds. ``deadline``: seconds without any data.
    """

    messages: Callable[[str], Exchange]
    sums: Callable[[str], Reduction]
    link: Link = lambda: (None, None)
    deadline: float = 60.0


@dataclass(frozen=True)
class Plan:
    """The policy that changes how a method exchanges, over ``steps``; 0: nobody knows how many."""

    policy: ReplicaPolicy
    steps: int = 0
    coded: Callable[[ReplicaChoice], Codec] = field(default=lambda choice: codec_of(choice))


def largest(ratio: float) -> Codec:
    """Return the codec of the largest values of a gradient: 8 bits each, a scale for 64.

    >>> largest(0.01)
    ChunkTopK(ratio=0.01, values=Uniform(bits=8, group=64))
    """
    return ChunkTopK(ratio, values=Uniform(8, group=64))


def codec_of(choice: ReplicaChoice) -> Codec:
    """Return the codec of a choice: the largest values, a dead zone, or values as they are."""
    if choice.ratio is not None:
        return largest(choice.ratio)
    return Raw() if choice.bits is None else Entropy(DeadZone(step_for(choice.bits)))


def replicate(
    method: Method, parameters: Mapping[str, Tensor], network: Network, plan: Plan | None = None
) -> Replicator:
    """Return what keeps ``parameters``, by name in the order of layers, together with other replicas'.

    Every rank calls this with the same method and plan, and parameters of the same names and shapes.
    """
    if isinstance(method, Differences):
        return LocalSteps(list(_fragments(method, parameters, network, Tally(), plan)))
    return by_gradients(method, Table(parameters), network, plan)


def by_gradients(
    method: AllReduce | Gradients,
    table: Table,
    network: Network,
    plan: Plan | None = None,
    skips: bool = False,
    undoable: bool = False,
) -> Replicator:
    """Return what exchanges the gradients of ``table``; ``skips`` and so on as for ``DelayedGradients``."""
    tally = Tally()
    if isinstance(method, AllReduce):
        dtype = getattr(torch, method.dtype)
        return SummedGradients(table, network.sums("sum"), tally, dtype, network.deadline, skips)
    mail, coder = _ends(method.scheme, table, network, tally, "gradients", method.staleness, 1, plan)
    return DelayedGradients(table, coder, mail, method.exact, skips, undoable)


def _fragments(
    method: Differences, parameters: Mapping[str, Tensor], network: Network, tally: Tally, plan: Plan | None
) -> list[Fragment]:
    parts, fragments = cut(parameters, method.fragments), []
    for k, part in enumerate(parts):
        table = Table(part)
        mail, coder = _ends(
            method.scheme, table, network, tally, f"fragment{k}", method.late, method.every, plan
        )
        first = mail.pilot.local_steps * (k + 1) // len(parts)
        fragments.append(Fragment(table, coder, mail, method, first))
    return fragments


def _ends(
    scheme: Scheme,
    table: Table,
    network: Network,
    tally: Tally,
    name: str,
    staleness: int,
    local_steps: int,
    plan: Plan | None,
) -> tuple[Mail, Coder]:
    exchange = network.messages(name)
    pilot = Pilot(staleness, local_steps) if plan is None else _adaptive(plan, table, network, exchange)
    mail = Mail(exchange, pilot, tally, network.deadline)
    return mail, Coder(scheme, table.shape, exchange.ranks, tally)


def _adaptive(plan: Plan, table: Table, network: Network, exchange: Exchange) -> Pilot:
    return AdaptivePilot(
        plan.policy,
        plan.coded,
        network.link,
        exchange.rank,
        exchange.ranks,
        table.numel,
        plan.steps,
    )


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
