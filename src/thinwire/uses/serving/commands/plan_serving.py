"""``thinwire plan-serving``: what stages on these machines would do, before they are started."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from thinwire.links.shape import LinkShape
from thinwire.runs.machine.standard_streams import PLAIN_WIDTH, print_json, tell
from thinwire.runs.terminal.activity import fetch_needs, load_average, warn_if_busy
from thinwire.runs.terminal.typer_options import with_config
from thinwire.types import InputError, require
from thinwire.uses.serving.planning.plan_options import PlannedConfig

SHOWN = (
    *(
        "model",
        "init",
        "machine",
        "memory",
        "link",
        "emulate",
        "congestion",
        "prompt_tokens",
        "tokens",
        "at_once",
    ),
    *("right_drafts", "chunk", "cache", "disk", "device", "dtype", "threads", "json"),
)
HELPS = {
    "link": "The link between neighbours, rate and one-way delay, as thinwire doctor prints it: 20mbit,20ms.",
    "emulate": "The link's rate is a line's, of which headers take their part, as serve --emulate has it.",
    "congestion": "TCP congestion control; with bbr no window shuts in pauses.",
    "json": "Print the plan as JSON, and nothing else, on stdout.",
}

Measure = Annotated[
    bool, typer.Option("--measure", help="Time this machine alone and print what --machine reads elsewhere.")
]


@with_config(PlannedConfig, only=SHOWN, helps=HELPS)
def plan_serving(given: dict[str, Any], measure: Measure = False) -> None:
    """Foretell what serving a model by stages takes: layers of each machine, first token, tokens a second.

    Times this machine with random layers of the model's config, so that it need not hold the model.

    [bold]Examples[/bold]

    thinwire plan-serving --model llama/ --machine speed=0.5,memory=8 --link 20mbit,20ms

    thinwire plan-serving --model llama/ --measure > attic.json      # there

    thinwire plan-serving --model llama/ --machine attic.json --link 20mbit,20ms
    """
    config = PlannedConfig.from_dict(given)
    known = measure or config.shape != LinkShape()
    missing = (
        f"--link {config.link} says nothing of the link; give what thinwire doctor finds, as in 20mbit,20ms"
    )
    require(known, InputError, missing)
    # After the checks: it imports the engine.
    from thinwire.uses.serving.planning.machine_timing import machines_of, read_others
    from thinwire.uses.serving.planning.serving_planner import ServingPlanner
    from thinwire.uses.serving.planning.stage_timing import measure as measured
    from thinwire.uses.serving.run.stage_program import prepared

    others = [] if measure else read_others(config)
    fetch_needs(config.model, quiet=config.json or measure)
    load, source = load_average(), prepared(config.replace(stages=config.machines))
    here = measured(config, source.config)
    if measure:
        print_json(here.to_dict())
        warn_if_busy(load)
        return
    machines = machines_of(here, others)
    plan = ServingPlanner(config, source, machines).plan()
    if config.json:
        print_json(plan.to_dict())
        return
    _print(plan, config, machines)
    warn_if_busy(load)


def _print(plan: Any, config: PlannedConfig, machines: Any) -> None:
    from thinwire.uses.serving.planning.plan_table import said, start_command, ways_table

    console = Console(width=None if Console().is_terminal else PLAIN_WIDTH, highlight=False)
    console.print(ways_table(plan))
    console.print()
    for sentence in said(plan, config, machines):
        console.print(sentence, markup=False)
    console.print("\nOn each machine, with the same token in THINWIRE_TOKEN:", markup=False)
    typer.echo(start_command(plan, config))
    tell("predicted from measured compute and the link as given; losses on it are not looked at")
