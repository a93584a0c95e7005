"""The part of ``thinwire pack`` that is of scenes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.runs.machine.standard_streams import print_json, tell
from thinwire.runs.records.folder_lock import holding
from thinwire.runs.records.progress import decibels
from thinwire.runs.terminal.activity import Activity
from thinwire.uses.packing import PackConfig
from thinwire.uses.scenes.commands.scene_places import PackedOut

if TYPE_CHECKING:
    from thinwire.uses.scenes.run.record import SceneRecord


def pack_scene(source: Path, place: PackedOut, config: PackConfig) -> None:
    """Pack a scene and say what became of it."""
    report, shape = config.report, config.shape
    with nullcontext() if report is None else holding(report, "--report"), Activity(config.json) as doing:
        # After the checks: a wrong option is refused before torch is even imported.
        from thinwire.uses.scenes.run.scene_packing import Packing, predicted
        from thinwire.uses.scenes.run.scene_packing import pack as packed

        cameras = None if config.cameras is None else Path(config.cameras)
        job = Packing(
            source, config.recipe, config.most, config.decibels, config.strict, cameras, config.refine
        )
        data, record = packed(job, doing.tell)
        record.config = {"scene": str(source), "recipe": config.recipe, "target": config.most}
        record.config |= {"quality": config.decibels, "strict": config.strict, "link": str(shape or "none")}
        record.config |= {"cameras": str(cameras or ""), "refine": config.refine}
        if shape is not None and shape.rate:
            record = predicted(record, shape)
        place.write(data)
        if report is not None:
            from thinwire.uses.scenes.run.left_pictures import leave_pictures

            page = leave_pictures(Path(report), record, source, data, config.credit, doing.tell)
    if config.json:
        print_json(record.to_dict())
        return
    _say(source, place.where, record)
    if report is not None:
        tell(f"report: {page}")


def _say(source: Path, out: str, record: SceneRecord) -> None:
    """Print what became of a scene, and what was lost."""
    streams = ", ".join(f"{name} {nbytes}" for name, nbytes in record.streams.items())
    tell(f"{source}: {record.splats} splats, {record.source_nbytes} bytes")
    tell(f"{out}: {record.packed_nbytes} bytes ({streams})")
    for i, layer in enumerate(record.layers[:-1], 1):
        tell(f"layer {i}: {layer.nbytes} bytes, {layer.splats} splats, {decibels(layer.psnr_db)}")
    for view in record.views:
        near = f"{decibels(view.psnr_db)}, SSIM {view.ssim or 0:.4f} to the source's own pictures"
        tell(f"{near}, by {view.reported} cameras {view.name}")
    tell(_told_unseen(record))
    for rival in record.rivals:
        tell(f"{rival.name}: {rival.nbytes} bytes, {decibels(rival.psnr_db)}")
    for note in [*record.notes, *_odd(record.odd)]:
        tell(f"note: {note}")


def _told_unseen(record: SceneRecord) -> str:
    from thinwire.uses.scenes.run.cards import unseen

    if not record.unseen:
        return f"each splat is seen by some of {sum(view.chosen for view in record.views)} cameras"
    return unseen(record) + ("" if record.cameras else "; --cameras says where it is looked at from")


def _odd(odd: dict[str, int]) -> list[str]:
    from thinwire.uses.scenes.run.cards import ODD

    return [f"{count} splats {ODD[kind].removesuffix(', kept')}" for kind, count in odd.items() if count]
