"""What packing leaves in a folder when asked: record, pictures, report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from thinwire.runs.records.writer import REPORT, forget
from thinwire.runs.report.page import leave_report
from thinwire.uses.scenes.files.foreign import write_foreign
from thinwire.uses.scenes.files.scene_file import read_scene_file
from thinwire.uses.scenes.run import cards
from thinwire.uses.scenes.run.credit import credit_of
from thinwire.uses.scenes.run.packing import views_of
from thinwire.uses.scenes.run.record import SceneRecord
from thinwire.uses.scenes.run.showing import draw_pictures
from thinwire.uses.scenes.scene import cleaned


def leave_pictures(
    folder: Path,
    record: SceneRecord,
    source: Path,
    packed: bytes,
    credit: str | None = None,
    told: Callable[[str], None] = lambda doing: None,
) -> Path:
    """Write ``run.json``, pictures and ``report.html`` of a packed scene to a folder; return the last.

    ``credit``: whose scene it is; what a licence beside the source says where it is None.
    """
    told("drawing pictures")
    forget(folder, REPORT)
    splats = cleaned(read_scene_file(source)[0])[0]
    record.credit = credit_of(source) if credit is None else credit
    rivals = {rival.name: write_foreign(splats, rival.name) for rival in record.rivals}
    cameras = views_of(splats, Path(record.cameras) if record.cameras else None).reported
    draw_pictures(record, splats, packed, rivals, folder, cameras)
    return leave_report(folder, record, cards)
