"""Start the ranks of a run that makes pictures, or join as one rank under torchrun."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.ranks.places import place_of
from thinwire.runs.ranks.rendezvous import starts_all
from thinwire.runs.ranks.supervise import Workers
from thinwire.runs.records.writer import RUN
from thinwire.uses.pictures.run.options import PicturesConfig
from thinwire.uses.pictures.run.recording import folder_of

PROGRAM = "thinwire.uses.pictures.run.program:run_rank"


def launch(config: PicturesConfig) -> list[Path]:
    """Make the pictures, and return the folder of each way, in the order asked.

    Errors: what the first failing rank raised; ``LinkError`` naming a rank that died. Nothing
    is recorded then.
    """
    folders = [folder_of(config, name) for name in config.ways]
    alone = starts_all(config)
    if alone or os.environ["RANK"] == "0":
        for folder in folders:  # what an earlier run left must not pass for this one's
            (folder / RUN).unlink(missing_ok=True)
            for picture in folder.glob("picture*.png"):
                picture.unlink()
    if alone:
        with stopped_by_signals(), place_of(config) as place:
            with Workers(place, PROGRAM) as ranks:
                ranks.run(config)
            place.book(*folders)
    else:
        from thinwire.uses.pictures.run.program import run_rank

        run_rank(config)
    return folders
