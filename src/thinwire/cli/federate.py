"""``thinwire federate``: many clients train one model, by several methods, on a virtual clock."""

from __future__ import annotations

import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.terminal.options import with_config
from thinwire.cli.terminal.output import REPORT, finish
from thinwire.lab.engines import load_run, load_runs
from thinwire.lab.federated.options import FederatedConfig
from thinwire.lab.machine.interrupts import stopped_by_signals
from thinwire.lab.records.holding import holding
from thinwire.lab.records.writer import COMPARE, write_json

if TYPE_CHECKING:
    from thinwire.lab.federated.recorded import Outcome
    from thinwire.lab.federated.simulate import Made

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


def run(config: FederatedConfig) -> None:
    """Run all methods, print the table and write the report.

    Errors: that of the first method that failed, once all have run.
    """
    # After the checks: a wrong option is refused before torch is even imported.
    from thinwire.lab.federated.run import Comparison, raise_failure

    out = Path(config.out)
    outcomes: list[Outcome] = []
    records: list[dict[str, Any]] = []
    with holding(out), stopped_by_signals():
        comparison = Comparison(config)
        for stale in (COMPARE, REPORT):  # of an earlier comparison, which must not pass for this one's
            (out / stale).unlink(missing_ok=True)
        with closing(comparison.run(_told(config))) as ended:
            for outcome in ended:
                outcomes.append(outcome)
                records.append(load_run(outcome.folder).to_dict())
                write_json(out / COMPARE, records)
    finish(load_runs([outcome.folder for outcome in outcomes]), out, config.json, records)
    raise_failure(outcomes)


def _told(config: FederatedConfig) -> Any:
    """Return what says on a terminal how far a run is."""
    shown = sys.stderr.isatty() and not (config.quiet or config.json)

    def told(name: str, made: Made, accuracy: float | None) -> None:
        if shown and accuracy is not None:
            sys.stderr.write(f"\r\033[K{name}: version {made.number}, {made.at:.0f} s, {accuracy:.1%}")
            sys.stderr.flush()

    return told
