"""``thinwire train``; and ``thinwire compare``: several recipes on the same seed and data order.

A recipe is one of stages; of replicas where there is one stage; ``Q/R``, both, where there are more of each.
"""

from __future__ import annotations

import os
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.runs.machine.standard_streams import print_json, tell
from thinwire.runs.ranks.rendezvous import under_torchrun
from thinwire.runs.records.finished_runs import slug
from thinwire.runs.records.folder_lock import holding
from thinwire.runs.records.writer import COMPARE, REPORT, RUN, forget, write_json
from thinwire.runs.terminal.activity import fetch_needs
from thinwire.runs.terminal.typer_options import is_leader, with_config
from thinwire.types import InputError, ThinwireError
from thinwire.uses.kinds import finish, load_run, load_runs, print_runs
from thinwire.uses.training.run.options import EVALUATION, TrainConfig


@with_config(TrainConfig)
def train(given: dict[str, Any]) -> None:
    """Train a model cut into pipeline stages, or copies of it, with compressed changes on the links.

    Starts one process a stage on this machine, or joins the others under torchrun. Leaves OUT/run.json,
    OUT/metrics.jsonl and OUT/model/, which from_pretrained loads.

    [bold]Examples[/bold]

    thinwire train --model gpt2-lab --data book.txt --steps 200

    thinwire train --recipe direct:bits=4 --link 10mbit,30ms --steps 60 --epochs 3

    torchrun --nnodes 2 --node-rank K --master-addr HOST --master-port 29500 -m thinwire train --host ADDRESS
    """
    config = TrainConfig.from_dict(given)
    # After the checks: a wrong option is refused before the engine is even imported.
    from thinwire.uses.training.run.training_launch import launch

    fetch_needs(config.model, config.data, quiet=config.quiet or config.json)
    out = launch(config)
    if not is_leader(config):
        return
    if config.json:
        print_json(load_run(out).to_dict())
        return
    print_runs(load_runs([out / RUN]))  # the folder may hold a comparison too
    tell(f"records in {out}; thinwire report {shlex.quote(str(out / RUN))} draws them")


Recipes = Annotated[
    list[str],
    typer.Argument(metavar="RECIPE...", help="Recipes to run, in this order; the ratios are against fp32."),
]


Reach = Annotated[
    int | None,
    typer.Option(
        metavar="STEPS",
        help="The first recipe takes --steps; each later one runs on until its held-out loss is at or under "
        "the one that the first ended with, on the same --eval-samples, for so many steps at most.",
        rich_help_panel=EVALUATION,
        min=1,
    ),
]


@with_config(
    TrainConfig,
    defaults={"out": "runs/compare"},
    without=("recipe", "replica_recipe", "until_loss", "until_sample"),
)
def compare(recipes: Recipes, given: dict[str, Any], reach: Reach = None) -> None:
    """Run several recipes on the same seed and data order, and show what each costs and wins.

    Leaves one folder a recipe in OUT, OUT/compare.json and OUT/report.html.

    [bold]Examples[/bold]

    thinwire compare fp32 direct:bits=4 thinwire --model gpt2-lab --link 10mbit,30ms --steps 60 --epochs 3

    thinwire compare allreduce auto --replicas 2 --model gpt2-lab --steps 30 --reach 75 --eval-every 2
    """
    run_all(configs_of(recipes, given), Path(given["out"]), reach)


def configs_of(recipes: list[str], given: dict[str, Any]) -> list[TrainConfig]:
    """Return a configuration a recipe, all checked before the first one runs."""
    names = [r.strip() for r in recipes]
    folders = [slug(name) for name in names]
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            raise InputError(f"the recipe {names[i]!r} is given twice; name each one once")
    if len(names) < 2:
        raise InputError(f"compare needs two recipes or more, not only {names[0]!r}; add fp32, or use train")
    base = TrainConfig.from_dict(given)
    return [
        base.replace(**_named_in(base, name), out=str(Path(base.out) / folder))
        for name, folder in zip(names, folders, strict=True)
    ]


def _named_in(base: TrainConfig, name: str) -> dict[str, str]:
    """Return the options that ``name`` stands for."""
    if base.replicas == 1:
        return {"recipe": name}
    if base.stages == 1:
        return {"replica_recipe": name}
    between_stages, slash, between_replicas = name.partition("/")
    if not slash:
        raise InputError(
            f"{name!r} is one recipe, but there are {base.layout}; name one of stages and one of replicas, "
            "as in thinwire/allreduce"
        )
    return {"recipe": between_stages, "replica_recipe": between_replicas}


def _check_reach(config: TrainConfig, reach: int) -> None:
    if under_torchrun(config) and os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
        raise InputError(
            f"--reach {reach} needs the first run's record, which other machines lack; leave it out"
        )
    if not (config.eval_every and config.eval_samples):
        raise InputError(f"--reach {reach} looks at evaluations on the way; give --eval-every")
    if config.epochs or config.lr_schedule != "constant":
        raise InputError(
            f"--reach {reach} changes how many steps there are, and with --epochs or --lr-schedule "
            f"{config.lr_schedule} what a step is; leave them out"
        )


def run_all(configs: list[TrainConfig], out: Path, reach: int | None = None) -> None:
    """Run every configuration, keep ``compare.json`` up to date, then print the table and write the report.

    With ``reach`` each but the first runs until its loss is that of the first, for so many steps at most.
    What may go on from checkpoints leaves both files of the part before until it has its own.
    Errors: the failing run's, with its recipe named; what finished before stays readable.
    """
    if reach is not None:
        _check_reach(configs[0], reach)
        for config in configs[1:]:
            config.replace(steps=reach)  # refused now, if at all
    first, leading = configs[0], is_leader(configs[0])
    fetch_needs(first.model, first.data, quiet=first.quiet or first.json)
    with holding(out) if leading else nullcontext():
        records = _run_each(configs, out, leading, reach)
        if leading:
            _finish(configs[0], out, records)


def _run_each(
    configs: list[TrainConfig], out: Path, leading: bool, reach: int | None
) -> list[dict[str, Any]]:
    """Run every configuration and return the records of the runs, none where another rank leads."""
    from thinwire.uses.training.run.training_launch import launch

    records: list[dict[str, Any]] = []
    if leading and not _goes_on(configs):
        forget(out, COMPARE, REPORT)
    for i, config in enumerate(_resumed(configs), 1):
        if leading and not config.quiet:
            tell(f"[{i}/{len(configs)}] {config.recipes}")
        try:
            folder = launch(config if reach is None or i == 1 else _reaching(config, reach, configs[0]))
        except ThinwireError as e:
            file = shlex.quote(str(out / COMPARE))
            hint = f"; thinwire report {file} shows those that finished" if records else ""
            raise _named(e, config.recipes, f"{len(records)} of {len(configs)}", hint) from e
        if leading:
            records.append(load_run(folder).to_dict())
            write_json(out / COMPARE, records)
    return records


def _reaching(config: TrainConfig, reach: int, first: TrainConfig) -> TrainConfig:
    loss = load_run(first.out).loss.eval_final  # type: ignore[attr-defined]
    return config.replace(steps=reach, until_loss=loss, until_sample=True)


def _kept(configs: list[TrainConfig]) -> list[bool]:
    """Return for each recipe whether there is a checkpoint of all its ranks on this machine."""
    from thinwire.uses.training.run.resume import newest_here

    return [newest_here(Path(config.out), config.ranks) is not None for config in configs]


def _goes_on(configs: list[TrainConfig]) -> bool:
    """Return whether this may be the rest of a comparison, which shows what it has until there is more."""
    first = configs[0]
    if not first.auto_resume or first.resume or under_torchrun(first):
        return first.resume or first.auto_resume
    return any(_kept(configs))


def _resumed(configs: list[TrainConfig]) -> list[TrainConfig]:
    """Return what to run: where some recipes go on from checkpoints, those that have none begin anew.

    Under torchrun one rank does not know what the others have: then all recipes go on, or none.
    """
    if under_torchrun(configs[0]) or not configs[0].resume:
        return configs
    kept = _kept(configs)
    return [c.replace(resume=k) for c, k in zip(configs, kept, strict=True)] if any(kept) else configs


def _named(error: ThinwireError, recipe: str, done: str, hint: str) -> ThinwireError:
    named = ThinwireError(f"recipe {recipe} failed after {done} runs: {error}{hint}")
    named.exit_code = error.exit_code
    return named


def _finish(config: TrainConfig, out: Path, records: list[dict[str, Any]]) -> None:
    runs = load_runs([out / COMPARE])  # the folder may hold a run of its own
    finish(runs, out, config.json, records)
