"""Replicas of a training run: their parameters, the network between them, and whether they are equal."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World
from thinwire.types import InputError
from thinwire.uses.training.pipeline.stage import CompressedStage
from thinwire.uses.training.replicas.assembly import Adaptation, synchroniser_of
from thinwire.uses.training.replicas.controller import PlanChange
from thinwire.uses.training.replicas.flat_parameters import FlatParameters
from thinwire.uses.training.replicas.networks import over_mesh
from thinwire.uses.training.replicas.synchroniser import Synchroniser
from thinwire.uses.training.run.job import Job
from thinwire.uses.training.run.record.schema import Decision
from thinwire.uses.training.run.setup import trained
from thinwire.uses.training.run.step_report import EXCHANGE

REPLICAS = "replicas"  # the boundary at which their decisions are


def parameters(stages: Sequence[CompressedStage]) -> dict[str, Tensor]:
    """Return what this rank trains by name, in the order of layers."""
    return {f"{s.stage_index}.{name}": p for s in stages for name, p in trained(s).items()}


def build_synchroniser(job: Job, world: World, stages: Sequence[CompressedStage]) -> Synchroniser:
    """Return what keeps this rank's parameters together with those of the other replicas."""
    recipe = job.replica_recipe
    ranks = [peer.rank for peer in world.partners.values()]
    network = over_mesh(world.rank, world.peers, ranks, job.config.deadline)
    policy = recipe.policy
    plan = None if policy is None else Adaptation(policy, job.steps)
    return synchroniser_of(recipe.schemes[EXCHANGE], parameters(stages), network, plan)


def exchanged(world: World) -> int:
    """Return the bytes that this rank has sent in exchanges, all headers included."""
    sent = [peer.meter.snapshot().sent for peer in world.partners.values()]
    return sum(labels[EXCHANGE].nbytes for labels in sent if EXCHANGE in labels)


def check_alike(world: World, telemetry: Telemetry, stages: Sequence[CompressedStage]) -> None:
    """Raise ``InputError`` unless all replicas train the same parameters."""
    own = parameters(stages)
    digests = telemetry.agree(b"R", FlatParameters(own).digest, "what it trains")
    for rank, digest in enumerate(digests):
        if rank % world.pipeline.size == world.pipeline.rank and digest != digests[world.rank]:
            raise InputError(
                f"rank {rank} trains other parameters than the {len(own)} of rank {world.rank}; "
                "start all replicas with the same model and cut"
            )


def check_same(
    world: World, telemetry: Telemetry, stages: Sequence[CompressedStage], synchroniser: Synchroniser
) -> None:
    """Raise ``InputError`` unless all replicas start from the same bits."""
    with synchroniser.shared():
        same = are_equal(world, telemetry, stages)
    if not same:
        raise InputError(
            "the replicas do not start from the same weights; start them all from the same model folder, "
            "since random ones may differ between machines"
        )


def measure_links(world: World) -> None:
    """Measure the idle links to the other replicas, before a plan is made by what they are."""
    for peer in world.partners.values():
        peer.measure()


def are_equal(world: World, telemetry: Telemetry, stages: Sequence[CompressedStage]) -> bool:
    """Return whether all replicas hold the same bits."""
    digest = hashlib.blake2b(digest_size=16)
    for p in parameters(stages).values():
        digest.update(p.detach().contiguous().view(-1).numpy().data)
    digests = telemetry.agree(b"H", digest.hexdigest(), "the digest of its parameters")
    size = world.pipeline.size
    return all(len(set(digests[place::size])) == 1 for place in range(size))


def decision(change: PlanChange) -> Decision:
    """Return the record's line for a change of the plan."""
    choice = change.choice
    return Decision(
        step=change.step,
        boundary=REPLICAS,
        direction=EXCHANGE,
        choice=describe(choice.ratio, choice.bits, choice.staleness, choice.local_steps),
        bits=choice.bits_per_value / choice.local_steps,
        reason=choice.reason,
        rate_bytes_s=change.site.rate,
        rtt_s=None if change.site.delay is None else 2 * change.site.delay,
        ratio=choice.ratio,
        staleness=choice.staleness,
        local_steps=choice.local_steps,
        predicted_s=choice.predicted,
    )


def describe(ratio: float | None, bits: float | None, staleness: int, local_steps: int) -> str:
    """Say in short how replicas exchange."""
    what = f"{ratio:.2%} of the values" if ratio is not None else f"{bits:.2g} bits" if bits else "as it is"
    often = f"every {local_steps} steps" if local_steps > 1 else "each step"
    return f"{what}, {often}" + (f", {staleness} late" if staleness else "")
