"""A plan for serving as people read it: a table, what is proposed, and the command that starts it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from thinwire.runs.records.progress import megabytes
from thinwire.runs.report.elements import terminal_table
from thinwire.uses.serving.planning.machine_timing import MachineTiming
from thinwire.uses.serving.planning.plan_options import PlannedConfig
from thinwire.uses.serving.planning.serving_planner import PlannedWay, ServingPlan

COLUMNS = ("way", "recipe", "drafts", "first token", "tokens a second", "of all texts", "sent")
NONE = "–"


def ways_table(plan: ServingPlan) -> Any:
    """Return the table of all ways; the proposed one is the first."""
    one = [plan.one] if plan.one else []
    return terminal_table(
        COLUMNS, [_row(way) for way in (*plan.stages, *one, *plan.experts)], left=(0, 1), wrap=False
    )


def _row(way: PlannedWay) -> list[str]:
    alone = way.recipe is None
    return [
        f"{way.way} (derived)" if way.derived else way.way,
        way.recipe or NONE,
        NONE if alone else str(way.drafts),
        f"{way.first_token_s:.3g} s",
        f"{way.tokens_per_second:.3g}",
        f"{way.all_per_second:.3g}",
        NONE if alone else megabytes(way.nbytes),
    ]


def said(plan: ServingPlan, config: PlannedConfig, machines: Sequence[MachineTiming]) -> Iterator[str]:
    """Yield what the plan means, sentence by sentence."""
    best, tokens = plan.stages[0], plan.tokens
    yield f"Proposed by stages: {best.recipe}, {best.seconds(tokens):.3g} s for a text of {tokens} tokens."
    for k, (layers, need, machine) in enumerate(zip(best.cut, plan.needs, machines, strict=True), 1):
        yield f"  machine {k}: {layers} layers, {need / 1e9:.2f} of {machine.memory / 1e9:.2f} GB"
    yield from _beside_one(plan)
    if plan.experts:
        yield (
            "Experts over machines wait for two exchanges in each of their layers: over a slow link they are "
            "the wrong cut. That row and experts from disk are arithmetic; thinwire has neither."
        )


def _beside_one(plan: ServingPlan) -> Iterator[str]:
    one, tokens = plan.one, plan.tokens
    if one is None:
        yield "No machine holds the model alone."
    elif plan.one_is_faster:
        yield (
            f"One machine is faster: {plan.alone} holds the model alone and takes "
            f"{one.seconds(tokens):.3g} s. Serve there, unless its memory is needed for something else."
        )
    else:
        yield f"{plan.alone} alone would take {one.seconds(tokens):.3g} s, so stages are faster.".capitalize()


def start_command(plan: ServingPlan, config: PlannedConfig) -> str:
    """Return the command that all machines start, each with its own --node-rank and --host."""
    best = plan.stages[0]
    options: dict[str, object] = {
        "model": config.model,
        "stages": len(best.cut),
        "cut": ",".join(map(str, best.cut)),
    }
    options |= {"recipe": best.recipe, "chunk": config.chunk, "cache": config.cache, "dtype": config.dtype}
    options |= {"init": config.init} if config.init else {}
    options |= {"threads": config.threads} if config.threads else {}
    words = ["torchrun", "--nnodes", str(len(best.cut)), "--node-rank", "K", "--master-addr", "HOST"]
    words += ["--master-port", "29500", "-m", "thinwire", "serve"]
    words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return shlex.join([*words, "--host", "ADDRESS"])
