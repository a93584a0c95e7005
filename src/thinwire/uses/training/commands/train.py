"""``thinwire train``."""

from __future__ import annotations

import shlex
from typing import Any

from thinwire.runs.machine.standard_streams import print_json, tell
from thinwire.runs.records.writer import RUN
from thinwire.runs.terminal.activity import fetch_needs
from thinwire.runs.terminal.typer_options import is_leader, with_config
from thinwire.uses.kinds import load_run, load_runs, print_runs
from thinwire.uses.training.run.options import TrainConfig


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
