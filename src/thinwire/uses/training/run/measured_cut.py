"""A cut by the speed of the machines: every rank times its own, and all agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from thinwire.runs.machine.processor import pick_dtype
from thinwire.runs.models.cuts import LayerCosts, cut_for, measured_costs, ranges, stage_costs
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World
from thinwire.uses.training.run import resume
from thinwire.uses.training.run.checks import MEASURED
from thinwire.uses.training.run.job import Job


def agree_cut(job: Job, world: World) -> Job:
    """Return the job cut by the machines' speeds where it asks for that, with a note of what was measured.

    All ranks time at once, because those on one machine share its cores in the run too. A resumed run keeps
    the cut of its checkpoints. Errors: ``LinkError`` naming a rank that does not answer.
    """
    if job.config.cut != MEASURED:
        return job
    telemetry = Telemetry(world, job.config.deadline)
    sizes = telemetry.spread(b"J", _kept(job, world), "the cut of the checkpoints")
    if sizes is not None:
        note = f"cut {_text(sizes)}, as measured when the run was started"
        return _with(job, ranges(sizes), note)
    telemetry.agree(b"T", 0, "the model to be timed")
    own = _measure(job, telemetry.working)
    found = telemetry.agree(b"T", [own.layers, own.head], "the times of its layers")
    ranks = [LayerCosts(tuple(layers), head) for layers, head in found]
    # As the stages are dealt out: every so many to a rank. All replicas have the cut of the first.
    size = world.pipeline.size
    machines = [ranks[k % size] for k in range(job.config.stages)]
    cut = cut_for(machines, size)
    return _with(job, cut, _note(cut, machines, size))


def _kept(job: Job, world: World) -> list[int] | None:
    return resume.saved_cut(Path(job.config.out), 0) if job.config.resume and world.rank == 0 else None


def _measure(job: Job, working: Callable[[], None]) -> LayerCosts:
    config = job.config
    rows, bf16 = config.rows, pick_dtype(config.dtype)[0] == "bf16"
    return measured_costs(job.source.config, rows, config.seq, lora=config.lora, bf16=bf16, working=working)


def _with(job: Job, cut: list[range], note: str) -> Job:
    return dataclasses.replace(job, cut=cut, notes=(*job.notes, note))


def _note(cut: Sequence[range], machines: Sequence[LayerCosts], ranks: int) -> str:
    seconds = [stage_costs(costs, cut)[k] for k, costs in enumerate(machines)]
    stages = ", ".join(f"{1e3 * s:.1f} ms in stage {k} on rank {k % ranks}" for k, s in enumerate(seconds))
    whole = [1e3 * (sum(costs.layers) + costs.head) for costs in machines[:ranks]]
    alone = ", ".join(f"{ms:.1f} ms on rank {r}" for r, ms in enumerate(whole))
    sizes = _text([len(part) for part in cut])
    return f"cut {sizes} as measured: a micro-batch takes {stages}; the whole model would take {alone}"


def _text(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))
