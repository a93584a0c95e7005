"""The demo of scenes: packed for some seconds of a link, it is sent layer by layer, then as SPZ."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

from thinwire.links.mesh import Peer
from thinwire.replacing import replacing
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.ranks.joining import joined
from thinwire.runs.ranks.launcher import LocalLauncher, link_of
from thinwire.runs.ranks.rank_main import await_order, say
from thinwire.runs.ranks.supervise import READY, Workers
from thinwire.runs.records.writer import RUN, forget
from thinwire.uses.scenes.files.foreign import read_foreign, write_foreign
from thinwire.uses.scenes.files.packed_scene import read_layers
from thinwire.uses.scenes.files.scene_file import read_scene_file
from thinwire.uses.scenes.layers import shown_after
from thinwire.uses.scenes.run.left_pictures import leave_pictures, packaged
from thinwire.uses.scenes.run.options import ScenesConfig
from thinwire.uses.scenes.run.record import SceneRecord
from thinwire.uses.scenes.run.scene_packing import Packing, pack, predicted
from thinwire.uses.scenes.scene import cleaned

PROGRAM = "thinwire.uses.scenes.run.demo_program:run_rank"
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


PACKED, RIVAL = "scene.tw", "scene.spz"  # files of the demo's folder
ASK, PIECE = b"ask", b"piece"
LABEL = "state"


def run_rank(config: ScenesConfig) -> None:
    """Send as the first rank, receive as the other."""
    with joined(config, "a sender and a receiver", "the number of processes") as world:
        (peer,) = world.peers.values()
        (send if world.rank == 0 else receive)(peer, config)
        await_order("stop", config.deadline)


def pieces_of(name: str, data: bytes) -> list[bytes]:
    """Return what of a file is sent at a time: a packed scene's layers, the header with the first."""
    if name != PACKED:
        return [data]
    ends = read_layers(data)[1]
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def send(peer: Peer, config: ScenesConfig) -> None:
    """Send each file that is asked for, until none is; what is not there is sent as nothing."""
    while name := peer.get(ASK, config.deadline, "what the receiver asks for").decode():
        file = Path(config.out) / name
        known = name in (PACKED, RIVAL) and file.exists()
        for piece in pieces_of(name, file.read_bytes()) if known else [b""]:
            peer.mailbox.send(PIECE, piece, LABEL)
    say("sent", lateness=peer.shaped.lateness.mean, worst=peer.shaped.lateness.worst)


def receive(peer: Peer, config: ScenesConfig) -> None:
    """Ask for both files in turn, decode what has come, and say when."""
    with suppress(ImportError):
        import_module("gaussforge")  # before the time is taken
    for name in (PACKED, RIVAL):
        peer.mailbox.send(ASK, name.encode(), LABEL)
        began, data, whole, i = monotonic(), b"", False, 0
        while not whole:
            piece = peer.get(PIECE, config.deadline, f"piece {i + 1} of {name}")
            data, i = data + piece, i + 1
            came = monotonic() - began
            if not piece:
                break
            if name == PACKED:
                layers, ends = read_layers(data)
                count, whole = shown_after(layers).count, len(layers) == len(ends)
            else:
                count, whole = read_foreign(data, "spz").count, True
            say("shown", file=name, piece=i, came=came, seconds=monotonic() - began, splats=count)
    peer.mailbox.send(ASK, b"", LABEL)
    say("received")
