"""``thinwire demo`` without a name, and ``demo replicas``: recipes over one slow link; and ``demo swarm``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from thinwire.runs.emulator.availability import as_emulated
from thinwire.runs.machine.standard_streams import tell
from thinwire.runs.terminal.typer_options import with_config
from thinwire.uses.training.commands.train import configs_of, run_all
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.swarm.run.options import SwarmConfig

RECIPES = ["fp32", "step-delta", "thinwire"]
DEMO: dict[str, Any] = {
    "model": "smollm2-135m",
    "data": "shakespeare",
    "link": "10mbit,30ms",
    "steps": 18,
    "epochs": 3,
    "batch": 4,
    "microbatches": 4,
    "seq": 128,
    "eval_samples": 8,
    "out": "runs/demo",
}
SHOWN = ("model", "data", "link", "steps", "epochs", "seed", "device", "dtype", "out", "json", "quiet")
HELPS = {
    "out": "Folder of the three runs and of their report; those there are replaced.",
    "link": "Rate per direction and one-way delay, as in 10mbit,30ms[,jitter=2ms][,loss=0.1%].",
    "steps": "Optimiser steps of each run.",
    "json": "Print the comparison, and nothing else, on stdout.",
}
REPLICA_RECIPES = ["allreduce", "cocktail", "deco", "auto"]
REPLICA_DEMO: dict[str, Any] = {
    "model": "gpt2-lab",
    "data": "shakespeare",
    "replicas": 2,
    "link": "40mbit,50ms",
    "steps": 30,
    "batch": 8,
    "seq": 64,
    "eval_every": 2,
    "save_model": False,
    "out": "runs/demo-replicas",
}
REACH = 75  # steps at most, to the loss that the first recipe ends with


@with_config(TrainConfig, defaults=DEMO, only=SHOWN, helps=HELPS)
def training(ctx: typer.Context, given: dict[str, Any]) -> None:
    """Show a use in a few minutes; without a name: fine-tune SmolLM2-135M over a home uplink.

    Three runs of 18 steps on Shakespeare: fp32, a published recipe and ours. Two processes on this machine,
    over a link shaped to 10 Mbit/s and 30 ms; about five minutes on two cores. Ends with a table and
    OUT/report.html.
    """
    if ctx.invoked_subcommand is not None:
        return
    *others, ours = configs_of(RECIPES, given)
    configs = [*(c.replace(save_model=False) for c in others), ours]
    if not (given.get("json") or given.get("quiet")):
        tell(f"three runs of {given['steps']} steps over a link of {given['link']}, one after another")
    run_all(configs, Path(given["out"]))


@with_config(TrainConfig, defaults=REPLICA_DEMO, only=SHOWN, helps=HELPS)
def replicas(given: dict[str, Any]) -> None:
    """Train a small GPT-2 on two replicas over 40 Mbit/s and 50 ms: all-reduce, two published ways, auto.

    The first takes 30 steps; the others run until their held-out loss is where it ended. The link is emulated
    below the kernel's TCP where this machine can, else shaped in the processes. About five minutes on two
    cores. Ends with seconds and bytes to that loss, and OUT/report.html.
    """
    emulate, how = as_emulated()
    configs = configs_of(REPLICA_RECIPES, given | {"emulate": emulate})
    if not (given.get("json") or given.get("quiet")):
        tell(f"four recipes over a link of {given['link']}, {how}")
    run_all(configs, Path(given["out"]), REACH)


SWARM_DEMO: dict[str, Any] = {
    "model": "gpt2-lab",
    "data": "shakespeare",
    "seq": 64,
    "rounds": 14,
    "local_steps": 6,
    "members": 6,
    "eval_every": 2,
    "warmup": 1,
    "save_model": False,
    "out": "runs/demo-swarm",
}
SWARM_SHOWN = ("rounds", "seed", "out", "json", "quiet")
SWARM_LINK = "20mbit,30ms;0=100mbit,30ms"


@with_config(SwarmConfig, defaults=SWARM_DEMO, only=SWARM_SHOWN)
def swarm(given: dict[str, Any]) -> None:
    """Let six members train a small GPT-2 while every 20 s one vanishes and another joins, and one lies.

    Each is a process that only dials out, over 20 Mbit/s and 30 ms to a keeper with 100 Mbit/s; emulated
    below the kernel's TCP where this machine can. Then the same samples again by members that all stay and
    none of which lies.
    Under five minutes on two cores. Ends with both losses, who was refused and why, and OUT/report.html.
    """
    from thinwire.runs.records.folder_lock import holding
    from thinwire.runs.terminal.activity import fetch_needs
    from thinwire.uses.kinds import finish, load_run, load_runs
    from thinwire.uses.training.swarm.run.swarm_demo import SwarmDemoConfig, play

    emulate, how = as_emulated()
    keeper, out = SwarmConfig.from_dict(given), Path(given["out"])
    fetch_needs(keeper.data, quiet=keeper.quiet or keeper.json)
    config = SwarmDemoConfig(
        swarm=keeper.to_json(),
        link=SWARM_LINK if emulate else "none",
        emulate=emulate,
        seed=keeper.seed,
        out=str(out),
    )
    if not (keeper.json or keeper.quiet):
        where = f"20 Mbit/s and 30 ms, {how}" if emulate else "loopback as fast as it is"
        tell(f"six members over {where}; one of them sends its changes with the sign turned")
    with holding(out):
        play(config, (lambda text: None) if keeper.quiet or keeper.json else tell)
    finish(load_runs([out]), out, keeper.json, [load_run(out).to_dict()])
