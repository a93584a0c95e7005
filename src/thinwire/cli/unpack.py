"""``thinwire unpack``: a packed scene, what has come of one, or a packed model, as other programs read it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.files.base import shown
from thinwire.replacing import replacing
from thinwire.runs import options as shared
from thinwire.runs.machine.standard_streams import tell
from thinwire.runs.options import Options, option
from thinwire.runs.terminal.addresses import check_new
from thinwire.runs.terminal.typer_options import with_config
from thinwire.types import InputError, PayloadError, ThinwireError, require
from thinwire.uses.models.commands.pack_model import is_packed_model, unpack_model
from thinwire.uses.scenes.commands.scene_places import is_folder, read_packed

Source = Annotated[
    str,
    typer.Argument(
        metavar="IN", help="A packed scene or model, a scene's URL, or a folder or store of its layers."
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out", "-o", metavar="FILE", help="A .ply, .compressed.ply or .spz to write, or a model's folder."
    ),
]


@dataclass(frozen=True)
class UnpackConfig(Options):
    """How much of a packed file to write, and what with it."""

    prefix: int | None = option(None, "", "Read only so many bytes of it.", metavar="BYTES", above=0)
    force: bool = shared.force()
    allow_code: bool = option(
        False, "", "Write a model's own Python code too, which whoever packed it chose."
    )


@with_config(UnpackConfig, file=False)
def unpack(source: Source, out: Out, given: dict[str, Any]) -> None:
    """Write what a packed file holds: a scene, that of its first bytes, or the folder of a model.

    From a folder or store the layers come one by one. Where that breaks off, those that came are written,
    and kept beside FILE as FILE.part.tw: the same command goes on from there.

    [bold]Examples[/bold]

    thinwire unpack scene.tw -o scene.ply

    thinwire unpack scene.tw -o coarse.spz --prefix 200000

    thinwire unpack s3://bucket/scene/ -o scene.ply

    thinwire unpack model.tw -o model
    """
    config = UnpackConfig.from_dict(given)
    folder = is_folder(source)
    if not folder and is_packed_model(Path(source)):
        require(config.prefix is None, InputError, "--prefix is for scenes; a model is read whole")
        unpack_model(Path(source), out, config.force, config.allow_code)
        return
    require(not config.allow_code, InputError, "--allow-code is for models; leave it out")
    if folder:
        _from_folder(source, out, config.prefix, config.force)
        return
    check_new(out, config.force)
    _write(read_packed(source, config.prefix), shown(source), out)


def _from_folder(source: str, out: Path, prefix: int | None, force: bool) -> None:
    # After the checks: a wrong option is refused before numpy is even imported.
    from thinwire.files.local_folder import open_folder
    from thinwire.uses.scenes.delivery import PartialFile, beside, fetch, first_pieces, read_manifest
    from thinwire.uses.scenes.files.packed_scene import read_outline

    check_new(out, force or beside(out).is_file())  # then this command began it
    began, folder = time.monotonic(), open_folder(source)
    pieces = read_manifest(folder)
    wanted, trouble = first_pieces(pieces, prefix), None
    kept = PartialFile(beside(out), wanted)
    if kept.held:
        tell(f"{kept.held} of {len(pieces)} layers came before, {len(kept.data)} bytes")
    try:
        for layer in fetch(folder, wanted, kept.held):
            kept.add(layer)
            splats = read_outline(memoryview(kept.data)).layers[kept.held - 1].splats
            took = time.monotonic() - began
            tell(f"layer {kept.held} of {len(pieces)}: {splats} splats, {len(kept.data)} bytes, {took:.1f} s")
    except ThinwireError as e:
        if not kept.held:
            raise
        trouble = e
    _write(kept.data, folder.where, out)
    if trouble is None:
        kept.remove()
    else:
        said = f"{out} has the layers before it, and the same command goes on from there"
        raise type(trouble)(f"{trouble}; {said}")


def _write(data: bytes | bytearray, where: str, out: Path) -> None:
    from thinwire.uses.scenes.files.clipping import told_beyond
    from thinwire.uses.scenes.files.packed_scene import read_scene
    from thinwire.uses.scenes.files.scene_file import form_of, scene_bytes
    from thinwire.uses.scenes.layers import shown_after

    try:
        layers = read_scene(memoryview(data))
        splats = shown_after(layers)
    except PayloadError as e:
        raise PayloadError(f"{where}: {e}") from e
    written = scene_bytes(splats, out)
    for note in told_beyond(splats, form_of(out)):
        tell(f"note: {note}")
    with replacing(out) as part:
        part.write_bytes(written)
    tell(f"{out}: {splats.count} splats of {len(layers)} layers, {len(written)} bytes")
