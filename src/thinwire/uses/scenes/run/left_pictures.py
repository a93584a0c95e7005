"""What packing leaves in a folder when asked: record, pictures, report, and whose scene it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinwire.replacing import replacing
from thinwire.runs.records.progress import megabytes
from thinwire.runs.records.writer import REPORT, forget
from thinwire.runs.report.page import leave_report
from thinwire.types import MissingExtra
from thinwire.uses.scenes.files.foreign import read_foreign, write_foreign
from thinwire.uses.scenes.files.packed_scene import read_scene
from thinwire.uses.scenes.files.scene_file import form_of, read_scene_file
from thinwire.uses.scenes.layers import shown_after
from thinwire.uses.scenes.run import cards
from thinwire.uses.scenes.run.record import Picture, SceneRecord
from thinwire.uses.scenes.run.scene_packing import views_of
from thinwire.uses.scenes.scene import Array, Splats, cleaned
from thinwire.uses.scenes.view.cameras import Camera
from thinwire.uses.scenes.view.project import Drawable
from thinwire.uses.scenes.view.render import render

if TYPE_CHECKING:
    from PIL.Image import Image


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


STRONGER = 4.0  # times, of a difference that is drawn
VIEW = 1  # of the reported cameras of a kind: the one of the pictures
MARGIN, INK, STRIP = 6, (235, 238, 242), (24, 28, 34)  # pixels; colours of the words under a picture
TITLE, SMALL = 15, 11  # pixels of the letters
PATTERN = "picture-*.png"


def draw_pictures(
    record: SceneRecord,
    source: Splats,
    packed: bytes,
    rivals: dict[str, bytes],
    folder: Path,
    cameras: Sequence[Camera],
) -> None:
    """Draw source, layers and rivals by a camera of each kind into a folder, and note them in the record.

    ``rivals``: files by their form. Each picture has its name and the scene's credit under it. Those of an
    earlier run go. Errors: ``MissingExtra``.
    """
    for old in folder.glob(PATTERN):
        old.unlink()
    shown = one_of_each(cameras)
    record.stronger, first = STRONGER, _drawn(source, shown)
    record.pictures = [Picture("source", _file("source"))]
    whole = f"the source, {megabytes(record.source_nbytes)}"
    _save(first, whole, record.credit, folder / _file("source"))
    for name, title, splats in _scenes(record, packed, rivals):
        drawn, picture = _drawn(splats, shown), Picture(name, _file(name), _file(name, "-off"))
        off = np.abs(np.clip(drawn, 0, 1) - np.clip(first, 0, 1)) * np.float32(STRONGER)
        _save(drawn, title, record.credit, folder / picture.file)
        said = f"difference, amplified {STRONGER:g} times: {title}"
        _save(off, said, record.credit, folder / picture.difference)
        record.pictures.append(picture)


def one_of_each(cameras: Sequence[Camera]) -> list[Camera]:
    """Return a camera of each kind: the second there is, where there are two."""
    by_kind = dict[str, list[Camera]]()
    for camera in cameras:
        by_kind.setdefault(camera.kind, []).append(camera)
    return [own[min(VIEW, len(own) - 1)] for own in by_kind.values()]


def _drawn(splats: Splats, cameras: Sequence[Camera]) -> Array:
    """Return the pictures by these cameras side by side."""
    scene = Drawable.of(splats)
    return np.concatenate([render(scene, camera) for camera in cameras], axis=1)


def _file(name: str, end: str = "") -> str:
    return f"picture-{name.replace(' ', '-')}{end}.png"


def _scenes(
    record: SceneRecord, packed: bytes, rivals: dict[str, bytes]
) -> Iterator[tuple[str, str, Splats]]:
    """Yield name, title and splats of what is seen after each layer, and of each rival."""
    layers, sent = read_scene(packed), len(packed) - sum(layer.nbytes for layer in record.layers)
    for i, told in enumerate(record.layers, 1):
        sent += told.nbytes
        name = f"layer {i}" if len(layers) > 1 else "packed"
        yield name, f"{name}, {megabytes(sent)}", shown_after(layers[:i])
    for form, data in rivals.items():
        yield form, f"{form.upper()}, {megabytes(len(data))}", read_foreign(data, form)


def _save(pixels: Array, title: str, credit: str, path: Path) -> None:
    """Write a picture [height, width, 3] as PNG with the words under it, atomically."""
    whole = np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    picture = labelled(whole, title, credit)
    with replacing(path) as part:
        picture.save(part, "PNG", optimize=True)


def labelled(pixels: npt.NDArray[np.uint8], title: str, credit: str) -> Image:
    """Return a picture of bytes [height, width, 3] with its title and its credit in a strip under it."""
    try:
        import matplotlib as mpl
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as e:
        raise MissingExtra("pictures need Pillow and matplotlib: pip install 'thinwire[cli]'") from e
    letters = str(Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")
    height, width = pixels.shape[:2]
    fonts = {title: ImageFont.truetype(letters, TITLE), credit: ImageFont.truetype(letters, SMALL)}
    lines = [
        (line, font)
        for text, font in fonts.items()
        for line in _wrapped(text, font.getlength, width - 2 * MARGIN)
    ]
    deep = MARGIN + sum(int(font.size) + MARGIN for _, font in lines)
    whole = Image.new("RGB", (width, height + deep), STRIP)
    whole.paste(Image.fromarray(pixels), (0, 0))
    pen, at = ImageDraw.Draw(whole), height + MARGIN
    for line, font in lines:
        pen.text((MARGIN, at - 2), line, INK, font)
        at += int(font.size) + MARGIN
    return whole


def _wrapped(text: str, length: Callable[[str], float], most: float) -> list[str]:
    """Return a text in lines of that length at most, as far as its words are not longer."""
    lines = list[str]()
    for word in text.split():
        if lines and length(f"{lines[-1]} {word}") <= most:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


LICENCE = re.compile(r"licen[cs]e", re.IGNORECASE)
MOST_NBYTES = 1 << 16  # of a licence that is read
FIELDS = {"title": "title", "author": "author", "licence": "licen[cs]e(?: type)?"}


def packaged() -> Path:
    """Return the scene that comes with thinwire: level 3 of PLAYBOT, with its licence beside it."""
    return Path(str(files("thinwire.uses.scenes.run") / "playbot" / "3_0.sog"))


def credit_of(source: Path) -> str:
    """Return whose scene is at a path, in one line; empty where no licence beside it names an author.

    A licence is a file with that word in its name, and has lines like ``* author: somebody``. Of a folder of
    SOG it may lie in the folder or beside it.
    """
    folders = [source, source.parent] if form_of(source) == "sog folder" else [source.parent]
    found = [f for folder in folders if folder.is_dir() for f in sorted(folder.iterdir())]
    for file in found:
        if LICENCE.match(file.name) and file.is_file() and file.stat().st_size <= MOST_NBYTES:
            line = credit_in(file.read_text("utf-8", errors="replace"))
            if line:
                return line
    return ""


def credit_in(text: str) -> str:
    """Return the credit that a licence's text asks for; empty where it names no author.

    >>> credit_in("* title: A\\n* author: B (b.org)\\n* license type: CC-BY-4.0 (http://c.org)")
    '"A" by B (b.org), CC-BY-4.0'
    """
    said = dict[str, str]()
    for name, words in FIELDS.items():
        line = re.search(rf"^[\s*]*{words}\s*:\s*(.+)$", text, re.IGNORECASE | re.MULTILINE)
        said[name] = line[1].strip() if line else ""
    if not said["author"]:
        return ""
    title = f'"{said["title"]}" by ' if said["title"] else "by "
    licence = said["licence"].partition(" (")[0]
    return title + said["author"] + (f", {licence}" if licence else "")
