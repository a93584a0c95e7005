"""``thinwire plan``: what a model would do on these machines over these links, before a run."""

from __future__ import annotations

import dataclasses
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from thinwire.runs.machine.standard_streams import PLAIN_WIDTH, print_json, tell
from thinwire.runs.options import flag
from thinwire.runs.report.elements import terminal_table
from thinwire.runs.terminal.activity import fetch_needs, load_average, warn_if_busy
from thinwire.runs.terminal.typer_options import with_config
from thinwire.types import InputError, require
from thinwire.uses.training.run.options import MAX_STAGES, TrainConfig

if TYPE_CHECKING:
    from thinwire.uses.training.pipeline.choosing.pipeline_plan import Proposal
    from thinwire.uses.training.planning.machines_file import MachinesFile

COLUMNS = ("recipe", "schedule", "order", "cut", "s/step", "tokens/s", "of unlimited", "of uncrowded")
USED = (
    "model",
    "init",
    "data",
    "text_field",
    "prompt_field",
    "bos",
    "seq",
    "batch",
    "microbatches",
    "schedule",
    "dtype",
    "lora",
    "device",
    "threads",
)
TRIED = ("1f1b", "eager1f1b", "gpipe")  # the least memory first
MORE = (
    "init",
    "lora",
    "text_field",
    "prompt_field",
    "bos",
)  # printed where they are not what they are by default
DEFAULTS = {f.name: f.default for f in dataclasses.fields(TrainConfig)}
HELPS = {
    "schedule": "The one to plan with: 1f1b, eager1f1b or gpipe. Without it all three are tried.",
    "data": "What the printed commands train on; the plan itself needs no text.",
}
GAIN = 0.02  # share of a step that leaving a machine out must save to be worth saying
HIDDEN = 0.01  # a transfer that adds less than this share of the step is hidden

File = Annotated[
    Path | None, typer.Argument(metavar="MACHINES.toml", help="The machines and the links between them.")
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Time the model's parts on this machine and print its entry.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the proposals or the measurement as JSON, and nothing else.")
]


@with_config(TrainConfig, only=USED, helps=HELPS, undecided=("schedule",))
def plan(given: dict[str, Any], machines: File = None, measure: Measure = False, json: Json = False) -> None:
    """Propose the order of the machines, the cut, the schedule and the recipe, with the predicted step.

    MACHINES.toml has a table "machine" for each, with name and speed (1.0: as fast as this one), or what
    --measure prints there, and a table "link" for each pair, with from, to and link = "100mbit,20ms".

    [bold]Examples[/bold]

    thinwire plan --measure --model smollm2-135m

    thinwire plan machines.toml --model smollm2-135m --batch 16 --microbatches 8
    """
    require(
        given.get("schedule") != "interleaved1f1b",
        InputError,
        f"plan does not foresee --schedule interleaved1f1b; give {', '.join(TRIED[:-1])} or {TRIED[-1]}, "
        "or leave it out",
    )
    # gpipe takes any number of micro-batches; what others need depends on how many machines there are
    config = TrainConfig.from_dict({"schedule": "gpipe"} | given)
    require(
        (machines is None) == measure,
        InputError,
        "plan takes a file of machines, or --measure without one; see thinwire plan --help",
    )
    from thinwire.uses.training.planning.machines_file import read_machines  # it needs torch

    found = None if machines is None else read_machines(machines)
    n = len(found.machines) if found is not None else 0
    schedules: Sequence[str] = (config.schedule,) if "schedule" in given else TRIED
    if found is not None:
        schedules = _taken(config, schedules, n)
    from thinwire.uses.training.planning.planner import Planner  # after the checks: it imports the engine

    fetch_needs(config.model, quiet=json)
    planner, load = Planner(config), load_average()
    if found is None:
        name, entry = socket.gethostname(), planner.measured()
        if json:
            print_json({"name": name} | dataclasses.asdict(entry))
        else:
            typer.echo(entry.toml(name))
        warn_if_busy(load)
        return
    proposals = planner.propose(found, schedules)
    if json:
        print_json([_plain(p, config) for p in proposals])
        return
    _print(proposals, config, found)
    fewer = planner.without_one(found, _taken(config, TRIED if "schedule" not in given else schedules, n - 1))
    _tell_spared(fewer, proposals[0])
    if any(m.measured is None for m in found.machines):
        warn_if_busy(load)


def _taken(config: TrainConfig, schedules: Sequence[str], machines: int) -> tuple[str, ...]:
    """Return those ``schedules`` that a run over so many machines takes; ``InputError`` where none is."""
    if not 2 <= machines <= MAX_STAGES:
        return tuple(schedules)  # the search says in its own words what is wrong
    taken: list[str] = []
    refused = None
    for schedule in schedules:
        try:
            taken.append(config.replace(schedule=schedule, stages=machines).schedule)
        except InputError as e:
            refused = e
    if not taken and refused is not None:
        raise refused
    return tuple(taken)


def _plain(p: Proposal, config: TrainConfig) -> dict[str, Any]:
    return dataclasses.asdict(p) | {"tokens_s": _tokens(config) / p.seconds}


def _tokens(config: TrainConfig) -> int:
    return config.batch * config.seq


def _print(proposals: list[Proposal], config: TrainConfig, file: MachinesFile) -> None:
    rows = [
        (
            p.recipe,
            p.schedule,
            " → ".join(p.order),
            ",".join(map(str, p.cut)),
            f"{p.seconds:.3g}",
            f"{_tokens(config) / p.seconds:.0f}",
            f"{p.unlimited_s / p.seconds:.0%}",
            f"{p.uncrowded_s / p.seconds:.0%}",
        )
        for p in proposals
    ]
    table = terminal_table(COLUMNS, rows, left=range(4), wrap=False)
    console = Console(width=None if Console().is_terminal else PLAIN_WIDTH, highlight=False)
    console.print(table)
    console.print(f"\nProposed: {proposals[0].recipe}, on the first pass over the samples:", markup=False)
    for leg in proposals[0].legs:
        cost = "hidden" if leg.added < HIDDEN else f"adds {leg.added:.0%} to the step"
        console.print(f"  {leg.source} → {leg.target}: {leg.bits:.1f} bits a value, {cost}", markup=False)
    console.print("\nStart one rank on each machine, with the same token in THINWIRE_TOKEN:", markup=False)
    for line in start_lines(proposals[0], config, file):
        typer.echo(line)
    tell("a machine that others reach by another address adds --advertise; docs/machines.md has the rest")
    tell("predicted from measured compute and the links as given; memory is not checked")


def _tell_spared(fewer: Mapping[str, Proposal], best: Proposal) -> None:
    """Say which machine had better not take part, if any: its links cost more than its help is worth."""
    name = min(fewer, key=lambda name: fewer[name].seconds, default="")
    if name and fewer[name].seconds < best.seconds * (1 - GAIN):
        less, seconds = 1 - fewer[name].seconds / best.seconds, fewer[name].seconds
        tell(f"without {name} a step takes {seconds:.3g} s, {less:.0%} less; take it out of the file")


def _option(name: str, value: object) -> list[str]:
    """Return an option as it is given; a switch has no value."""
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no_{name}")]
    return [flag(name), str(value)]


def start_lines(proposal: Proposal, config: TrainConfig, file: MachinesFile) -> list[str]:
    """Return the command of each rank, in order; a machine without an address is left to be filled in."""
    addresses = {m.name: m.address or f"ADDRESS_OF_{m.name}" for m in file.machines}
    n, first = len(proposal.order), addresses[proposal.order[0]]
    options = {
        "model": config.model,
        "data": config.data,
        "recipe": proposal.recipe,
        "stages": n,
        "cut": ",".join(map(str, proposal.cut)),
        "schedule": proposal.schedule,
        "batch": config.batch,
        "microbatches": config.microbatches,
        "seq": config.seq,
        "dtype": config.dtype,
    }
    options |= {name: value for name in MORE if (value := getattr(config, name)) != DEFAULTS[name]}
    words = [word for name, value in options.items() for word in _option(name, value)]
    start = ["torchrun", "--nnodes", str(n), "--nproc-per-node", "1", "--master-addr", first]
    start += ["--master-port", "29500"]
    train = ["-m", "thinwire", "train", *words]
    on = {m.name: m.measured.device if m.measured else config.device for m in file.machines}
    threads = {m.name: m.measured.threads if m.measured else config.threads for m in file.machines}

    def own(name: str) -> list[str]:
        host = ["--host", addresses[name]]
        more = ["--device", on[name]] if on[name] not in ("cpu", "auto") else []  # auto takes a card there is
        return [*(["--threads", str(threads[name])] if threads[name] else []), *more, *host]

    return [
        shlex.join([*start, "--node-rank", str(k), *train, *own(name)])
        for k, name in enumerate(proposal.order)
    ]
