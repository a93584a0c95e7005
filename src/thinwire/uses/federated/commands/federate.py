"""``thinwire federate``: many clients train one model, by several methods, on a virtual clock."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.machine.standard_streams import draws, tell
from thinwire.runs.records.folder_lock import holding
from thinwire.runs.records.writer import COMPARE, REPORT, forget, write_json
from thinwire.runs.terminal.activity import fetch_needs
from thinwire.runs.terminal.typer_options import with_config
from thinwire.types import ThinwireError, require
from thinwire.uses.federated.run.options import FederatedConfig
from thinwire.uses.kinds import finish, load_run, load_runs

if TYPE_CHECKING:
    from thinwire.rounds.client_scheduler import MadeVersion
    from thinwire.uses.federated.run.comparison import Outcome

Methods = Annotated[
    list[str],
    typer.Argument(metavar="METHOD...", help="How clients and server exchange: thinwire recipes lists them."),
]


@with_config(FederatedConfig, without=("methods",))
def federate(methods: Methods, given: dict[str, Any]) -> None:
    """Train one model on the data of many clients, which stay with them, by one method or several.

    Clients compute for real; their devices, links and the server's are of a virtual clock, so that an hour on
    slow links takes minutes. The same seeds give the same runs. Leaves one folder a run in OUT,
    OUT/compare.json and OUT/report.html.

    [bold]Examples[/bold]

    thinwire federate fedavg fedluck thinwire --devices ten-one-straggler --until 0.78 --budget 1h

    thinwire federate thinwire --data digits --split classes:2 --clients 20 --participate 5
    """
    run(FederatedConfig.from_dict(given | {"methods": shlex.join(methods)}))


def run(config: FederatedConfig, real: str = "", rounds: int | None = None) -> None:
    """Run all methods, print the table and write the report.

    ``real``: a method that real processes run too, for so many ``rounds``, by default all. Errors: that of
    the first method that failed, once all have run; ``ThinwireError`` where processes came to other weights.
    """
    # After the checks: a wrong option is refused before torch is even imported.
    from thinwire.uses.federated.run.comparison import Comparison, raise_failure

    fetch_needs(config.data, quiet=config.quiet or config.json)
    out = Path(config.out)
    outcomes: list[Outcome] = []
    records: list[dict[str, Any]] = []
    with holding(out), stopped_by_signals():
        comparison = Comparison(config)
        forget(out, COMPARE, REPORT)
        with closing(comparison.run(_told(config))) as ended:
            for outcome in ended:
                outcomes.append(outcome)
                records.append(load_run(outcome.folder).to_dict())
                write_json(out / COMPARE, records)
        again = _deploy(config, real or config.ways[0], rounds, outcomes) if real or config.deploy else None
        if again is not None:
            records[again] = load_run(outcomes[again].folder).to_dict()
            write_json(out / COMPARE, records)
    finish(load_runs([outcome.folder for outcome in outcomes]), out, config.json, records)
    if again is not None:
        _check_deployed(config, outcomes[again].folder)
    raise_failure(outcomes)


def _deploy(config: FederatedConfig, name: str, rounds: int | None, outcomes: list[Outcome]) -> int | None:
    """Run a method in real processes, and add what came of it to its record; return which one that is."""
    from thinwire.uses.federated.run.deployment import deploy_as

    for place, outcome in enumerate(outcomes):
        if outcome.name == name and outcome.error is None:
            if not config.json:
                tell(f"{name} again, in {config.clients + 1} real processes")
            deploy_as(config, outcome.folder, rounds)
            return place
    return None


def _check_deployed(config: FederatedConfig, folder: Path) -> None:
    from thinwire.uses.federated.run.cards import deployed

    record = load_runs([folder])[0].record
    require(record.deployment["identical"], ThinwireError, deployed(record))
    if not config.json:
        tell(deployed(record))


def _told(config: FederatedConfig) -> Any:
    """Return what says on a terminal how far a run is."""
    shown = draws(sys.stderr) and not (config.quiet or config.json)

    def told(name: str, made: MadeVersion, accuracy: float | None) -> None:
        if shown and accuracy is not None:
            text = f"{name}: version {made.number}, {made.at:.0f} s, {accuracy:.1%}"
            sys.stderr.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()

    return told
