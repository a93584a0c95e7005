"""Start the ranks of a run that makes pictures, or join as one rank under torchrun."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.lab.machine.interrupts import stopped_by_signals
from thinwire.lab.pictures.options import PicturesConfig
from thinwire.lab.pictures.recording import folder_of
from thinwire.lab.ranks.places import place_of
from thinwire.lab.ranks.rendezvous import starts_all
from thinwire.lab.ranks.supervise import Workers
from thinwire.lab.records.writer import RUN

PROGRAM = "thinwire.lab.pictures.program:run_rank"


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
        from thinwire.lab.pictures.program import run_rank

        run_rank(config)
    return folders
