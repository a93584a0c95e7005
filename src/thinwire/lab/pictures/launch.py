"""Start the ranks of a run that makes pictures, or join as one rank under torchrun."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from thinwire.lab.machine.interrupts import stopped_by_signals
from thinwire.lab.machine.network import check_own
from thinwire.lab.pictures.options import PicturesConfig
from thinwire.lab.pictures.recording import folder_of
from thinwire.lab.ranks.places import place_of
from thinwire.lab.ranks.rendezvous import check_reach, under_torchrun
from thinwire.lab.ranks.supervise import Workers
from thinwire.lab.records.writer import RUN
from thinwire.types import InputError, MeasurementError, require

PROGRAM = "thinwire.lab.pictures.program:run_rank"


def launch(config: PicturesConfig) -> list[Path]:
    """Make the pictures, and return the folder of each way, in the order asked.

    Errors: what the first failing rank raised; ``LinkError`` naming a rank that died. Nothing
    is recorded then.
    """
    folders = [folder_of(config, name) for name in config.ways]
    joins = under_torchrun(config)
    if not joins or os.environ["RANK"] == "0":
        for folder in folders:  # what an earlier run left must not pass for this one's
            (folder / RUN).unlink(missing_ok=True)
            for picture in folder.glob("picture*.png"):
                picture.unlink()
    if joins:
        text = "--emulate starts all ranks itself, but RANK is set; leave torchrun out, or --emulate"
        require(not config.emulate, InputError, text)
        check_reach(config)
        from thinwire.lab.pictures.program import run_rank

        run_rank(config)
        return folders
    _run_all(config, folders)
    return folders


def _run_all(config: PicturesConfig, folders: list[Path]) -> None:
    if not config.emulate and config.relay is None:
        check_own(config.host)
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals())
        place = stack.enter_context(place_of(config))
        with Workers(place, PROGRAM) as ranks:
            for _ in range(config.ranks):
                ranks.start(config)
            ranks.wait()
        late: MeasurementError | None = None
        for folder in folders:
            try:
                place.book(folder)
            except MeasurementError as e:  # of all of them alike: they share the network
                late = e
        if late is not None:
            raise late
