"""``thinwire generate``: one picture by several machines, in several ways."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.runs.records.folder_lock import holding
from thinwire.runs.records.writer import COMPARE, REPORT, forget, write_json
from thinwire.runs.terminal.typer_options import is_leader, with_config
from thinwire.uses.kinds import finish, load_run, load_runs
from thinwire.uses.pictures.run.options import PicturesConfig

Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...", help="Ways to divide the work and to send: thinwire recipes lists them."
    ),
]


@with_config(PicturesConfig, without=("recipes",))
def generate(names: Names, given: dict[str, Any]) -> None:
    """Make one picture, or one clip, on several machines, and show what each way took and how near it came.

    First predicts each way of flux-fashion from a measured step and link; auto takes the fastest that keeps
    to --psnr. Leaves one folder a way in OUT, OUT/compare.json and OUT/report.html.

    [bold]Examples[/bold]

    thinwire generate auto --link 100mbit,5ms --emulate

    thinwire generate one fp16 compact compact:bits=2 --sheet 4x4 --link 100mbit,5ms --repeat 3

    thinwire generate one ep-sync dice dice-residual --model flux-fashion-moe --link 100mbit,5ms --emulate

    thinwire generate one fp16 compact --model wan-fashion --frames 24 --classes 3,7 --link 100mbit,5ms
    """
    run_all(PicturesConfig.from_dict(given | {"recipes": shlex.join(names)}))


def run_all(config: PicturesConfig) -> None:
    """Make the pictures, print the table and write the report."""
    # After the checks: a wrong option is refused before the engine is even imported.
    from thinwire.uses.pictures.run.generation import launch

    out, leads = Path(config.out), is_leader(config)
    with holding(out) if leads else nullcontext():
        if leads:
            forget(out, COMPARE, REPORT)
        folders = launch(config)
        if not leads:
            return
        records = [load_run(folder).to_dict() for folder in folders]
        write_json(out / COMPARE, records)
    finish(load_runs(folders), out, config.json, records)
