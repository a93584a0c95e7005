"""The trained model, gathered into one Hugging Face folder, and its adapters into another."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from thinwire.files.base import at_home
from thinwire.replacing import PART, replacing
from thinwire.runs.machine.interrupts import held_back
from thinwire.runs.models.folder import (
    finish_adapters,
    finish_model,
    put_in_place,
    remove_adapters,
    remove_model,
    save_adapters,
    save_stage,
    shard_name,
)
from thinwire.runs.ranks.telemetry import Telemetry
from thinwire.runs.ranks.world import World
from thinwire.uses.training.pipeline.compressed_stage import CompressedStage
from thinwire.uses.training.run.stepper import Autocast
from thinwire.uses.training.run.training_job import Job

PIECE = 1 << 22  # bytes of a shard in one message
MARK = ".writing"
UNFINISHED = f".saving{PART}"  # the folder in which a model is until it is whole
SAVING = "saving"  # the label of what crosses links for it


def export_model(job: Job, world: World, stages: list[CompressedStage], telemetry: Telemetry) -> None:
    """Write the whole model to ``OUT/model`` of rank 0 if it is wanted, and adapters to ``OUT/adapter``.

    Each takes the place of what was saved there before when it is whole. Without the model nothing that is
    frozen crosses the links.
    """
    out, n, config = Path(job.config.out), job.config.stages, job.config
    if config.save_model:
        with _replacing_folder(out / "model", world, telemetry) as part:
            _gather(part, save_stage, job, world, stages, telemetry)
            if world.rank == 0:
                finish_model(part, job.source, n, config.save_dtype)
    if config.lora:
        with _replacing_folder(out / "adapter", world, telemetry) as part:
            _gather(part, save_adapters, job, world, stages, telemetry)
            if world.rank == 0:
                finish_adapters(part, job.source, config.lora, n)
    elif world.rank == 0:
        remove_adapters(out / "adapter")


def saving_bytes(world: World) -> int:
    """Return the bytes on the wire that brought the other ranks' parts of the model here."""
    received = [peer.meter.snapshot().received for peer in world.peers.values()]
    return sum(counts[SAVING].nbytes for counts in received if SAVING in counts)


def remove_models(out: Path, start: str) -> None:
    """Remove the model and the adapters of an earlier run in this folder, unless ``start`` is among them."""
    if Path(out).resolve() not in at_home(start).resolve().parents:
        remove_model(out / "model")
        remove_adapters(out / "adapter")
        for name in ("model", "adapter"):
            _discard(out / name / UNFINISHED)


def _discard(part: Path) -> None:
    """Remove what is not to be put in its place, and the folder around it if that was made for it."""
    shutil.rmtree(part, ignore_errors=True)
    with suppress(OSError):  # there is none, or something else is in it
        part.parent.rmdir()


@contextmanager
def _replacing_folder(folder: Path, world: World, telemetry: Telemetry) -> Iterator[Path]:
    """Yield a folder to write to, which rank 0 puts in the place of ``folder`` at the end; all wait for that.

    If the block raises on any rank, ``folder`` stays as it was, and nothing is left in it. What others than
    rank 0 write to a folder of their own is theirs to remove.
    """
    part = folder / UNFINISHED  # inside, since ``folder`` may be on a disk of its own
    try:
        if world.rank == 0:
            shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
        part.mkdir(parents=True, exist_ok=True)
        yield part
        if world.rank == 0:
            with held_back():  # or a Ctrl-C would leave half of two models
                put_in_place(part, folder)
        telemetry.agree(b"F", 0, f"the {folder.name} to be in its place")
    except BaseException:
        if world.rank == 0:
            _discard(part)
        raise


def _gather(
    folder: Path,
    save: Callable[[Any, Path, int, int, str], Path],
    job: Job,
    world: World,
    stages: list[CompressedStage],
    telemetry: Telemetry,
) -> None:
    """Bring what ``save`` writes of every stage to ``folder`` of rank 0.

    Ranks on one file system write their shards in place; others send theirs over the link.
    """
    shared = _sharing(folder, world, telemetry)
    n = job.config.stages
    try:
        for stage in stages:
            save(_module(stage), folder, stage.stage_index, n, job.config.save_dtype)
            telemetry.working()  # the others wait behind all of this rank's stages
        telemetry.agree(b"W", 0, "the stages to be saved")
        for index in range(n):
            owner = index % world.size
            if not shared[owner]:
                _send_shard(folder / shard_name(index, n), owner, world, telemetry, job.config.deadline)
    except BaseException:
        if shared[world.rank] and world.rank:
            # Rank 0 cannot remove it while a shard of this rank is being written there.
            with suppress(OSError):
                folder.rmdir()
                folder.parent.rmdir()
        raise
    finally:
        if not shared[world.rank]:
            _discard(folder)


def _module(stage: CompressedStage) -> nn.Module:
    if not isinstance(stage.submod, Autocast):
        raise TypeError(f"stage {stage.stage_index} was not made by build_stages")
    return stage.submod.stage


def _sharing(folder: Path, world: World, telemetry: Telemetry) -> list[bool]:
    """Return for each rank whether it sees rank 0's folder: whether it finds the mark rank 0 left there."""
    mark = telemetry.spread(
        b"M", _leave_mark(folder) if world.rank == 0 else None, "the mark of the model folder"
    )
    file = folder / MARK
    marked = file.is_file() and file.read_text("utf-8") == mark
    seen = telemetry.agree(b"M", marked, "the state of the model folder")
    if world.rank == 0:
        file.unlink()
    return [bool(s) for s in seen]


def _leave_mark(folder: Path) -> str:
    mark = secrets.token_hex(16)
    (folder / MARK).write_text(mark, "utf-8")
    return mark


def _send_shard(file: Path, owner: int, world: World, telemetry: Telemetry, deadline: float) -> None:
    """Bring one shard from its owner to rank 0 by pieces; the owner waits for each, to hold but one.

    That can take minutes, while which the others wait for both.
    """
    if world.rank == owner:
        size = file.stat().st_size
        telemetry.send(0, b"Q", size)
        mailbox = world.peers[0].mailbox
        with file.open("rb") as f:
            while piece := f.read(PIECE):
                mailbox.send(b"part", piece, SAVING).result()
                telemetry.working()
        file.unlink()  # a part of a model is none
    elif world.rank == 0:
        left = int(telemetry.get(owner, b"Q", "the size of its part of the model"))
        with replacing(file) as temporary, temporary.open("wb") as f:
            while left > 0:
                piece = world.peers[owner].get(b"part", deadline, "a part of the model")
                f.write(piece)
                telemetry.working()
                left -= len(piece)
