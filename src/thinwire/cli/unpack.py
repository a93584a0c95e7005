"""``thinwire unpack``: a packed scene, what has come of one, or a packed model, as other programs read it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.pack import Force, check_new
from thinwire.cli.pack_model import is_packed_model, unpack_model
from thinwire.cli.terminal.output import tell
from thinwire.replacing import replacing
from thinwire.types import InputError, PayloadError, require

Source = Annotated[Path, typer.Argument(metavar="IN", help="A packed scene or model.")]
Out = Annotated[
    Path,
    typer.Option(
        "--out", "-o", metavar="FILE", help="A .ply, .compressed.ply or .spz to write, or a model's folder."
    ),
]
Prefix = Annotated[int | None, typer.Option(metavar="BYTES", help="Read only so many bytes of it.")]


def unpack(source: Source, out: Out, prefix: Prefix = None, force: Force = False) -> None:
    """Write what a packed file holds: a scene, that of its first bytes, or a model that transformers loads.

    [bold]Examples[/bold]

    thinwire unpack scene.tw -o scene.ply

    thinwire unpack scene.tw -o coarse.spz --prefix 200000

    thinwire unpack model.tw -o model
    """
    require(prefix is None or prefix > 0, InputError, f"--prefix is {prefix}; it must be above 0")
    if is_packed_model(source):
        require(prefix is None, InputError, "--prefix is for scenes; a model is read whole")
        unpack_model(source, out, force)
        return
    check_new(out, force)
    # After the checks: a wrong option is refused before numpy is even imported.
    from thinwire.assets.splats.files.container import read_scene
    from thinwire.assets.splats.files.scene_file import scene_bytes
    from thinwire.assets.splats.layers import shown_after

    with source.open("rb") as file:
        data = file.read() if prefix is None else file.read(prefix)
    try:
        layers = read_scene(data)
        splats = shown_after(layers)
    except PayloadError as e:
        raise PayloadError(f"{source}: {e}") from e
    written = scene_bytes(splats, out)
    with replacing(out) as part:
        part.write_bytes(written)
    tell(f"{out}: {splats.count} splats of {len(layers)} layers, {len(written)} bytes")
