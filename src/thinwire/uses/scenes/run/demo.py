"""The demo of scenes: packed for some seconds of a link, it is sent layer by layer, then as SPZ."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.replacing import replacing
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.ranks.launcher import LocalLauncher, link_of
from thinwire.runs.ranks.supervise import READY, Workers
from thinwire.runs.records.writer import RUN, forget
from thinwire.uses.scenes.files.foreign import write_foreign
from thinwire.uses.scenes.files.scene_file import read_scene_file
from thinwire.uses.scenes.run.credit import packaged
from thinwire.uses.scenes.run.options import ScenesConfig
from thinwire.uses.scenes.run.packing import Packing, pack, predicted
from thinwire.uses.scenes.run.record import SceneRecord
from thinwire.uses.scenes.run.reporting import leave_pictures
from thinwire.uses.scenes.run.sending import PACKED, RIVAL
from thinwire.uses.scenes.scene import cleaned

PROGRAM = "thinwire.uses.scenes.run.sending:run_rank"
NAMES = ("sender", "receiver")  # by rank
LATE = 0.1  # seconds behind the link's timetable, on average, that a reader must know
Show = Callable[[str], None]


def run(config: ScenesConfig, show: Show) -> tuple[SceneRecord, Path]:
    """Play the demo, which says through ``show`` what is going on; return its record and report.

    Errors: ``InputError`` for a scene that cannot be packed so; what a process said that failed.
    """
    out, began = Path(config.out), time.monotonic()
    source = Path(config.scene) if config.scene else packaged()
    with stopped_by_signals():
        forget(out, RUN, PACKED, RIVAL)
        data, record = pack(Packing(source, nbytes=config.nbytes), show)
        files = {PACKED: data}
        if record.rivals:
            files[RIVAL] = write_foreign(cleaned(read_scene_file(source)[0])[0], "spz")
        for name, held in files.items():
            with replacing(out / name) as part:
                part.write_bytes(held)
        record = replace(predicted(record, config.shape), link=link_of(config), config=config.to_dict())
        _send(config, record, max(map(len, files.values())), show)
        record.totals["seconds"] = time.monotonic() - began
        if not config.scene:  # where thinwire is installed says nothing
            record.source = source.name
        return record, leave_pictures(out, record, source, data, config.credit, show)


def _send(config: ScenesConfig, record: SceneRecord, most: int, show: Show) -> None:
    """Let one process send the files to another, and note in the record when each piece was seen."""
    patience = READY + 2 * (most / (config.shape.rate or 1.0) + config.shape.delay)
    show("starting a sender and a receiver")
    with LocalLauncher() as place, Workers(place, PROGRAM, NAMES) as workers:
        for _ in NAMES:
            workers.start(config)
        ended = set[str]()
        while len(ended) < len(NAMES):
            _, said = workers.hear(patience)
            if said["kind"] == "shown":
                _note(record, said, show)
            else:
                ended.add(said["kind"])
                record.link.lateness_s = said.get("lateness", record.link.lateness_s)
        workers.dismiss()
    late = record.link.lateness_s or 0.0
    if late > LATE:
        record.notes.append(f"the shaped link was {late:.2f} s late on average: this machine had other work.")


def _note(record: SceneRecord, said: dict[str, Any], show: Show) -> None:
    if said["file"] == PACKED:
        record.layers[said["piece"] - 1].seconds_measured = said["seconds"]
        show(f"layer {said['piece']} of {len(record.layers)} is seen after {said['seconds']:.2f} s")
        return
    record.rivals[0].seconds_measured = said["seconds"]
    show(f"SPZ is seen after {said['seconds']:.2f} s")
