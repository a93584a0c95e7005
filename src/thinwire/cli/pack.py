"""``thinwire pack``: a scene of 3D Gaussians, or a model, as small as a target asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.runs.terminal.activity import fetch_needs
from thinwire.runs.terminal.addresses import check_new
from thinwire.runs.terminal.typer_options import with_config
from thinwire.types import InputError, require
from thinwire.uses.models.commands.pack_model import (
    check_folder,
    check_out,
    check_unpacked,
    is_model,
    pack_model,
)
from thinwire.uses.packing import PackConfig
from thinwire.uses.scenes.commands.pack_scene import pack_scene
from thinwire.uses.scenes.commands.scene_places import PackedOut

Source = Annotated[
    Path,
    typer.Argument(
        metavar="IN",
        help="A .ply, .compressed.ply, .spz, .splat or .sog, a folder of SOG, or a model's folder or name.",
    ),
]
Out = Annotated[
    str,
    typer.Option(
        "--out", "-o", metavar="PLACE", help="The packed file to write; with / at its end, a file a layer."
    ),
]


@with_config(PackConfig)
def pack(source: Source, out: Out, given: dict[str, Any]) -> None:
    """Pack a scene of 3D Gaussians, or a language model, into few bytes: without any training.

    Of a scene, says what was lost against its own pictures, and what SPZ takes. Of a model, says what a text
    tells of it: its perplexity before and after.

    [bold]Examples[/bold]

    thinwire pack scene.ply -o scene.tw --target 5MB

    thinwire pack scene.spz -o scene.tw --seconds 4 --link 10mbit,30ms --report runs/scene

    thinwire pack room.ply -o room.tw --quality 40dB --cameras cameras.json

    thinwire pack scene.ply -o s3://bucket/scene/ --target 5MB

    thinwire pack smollm2-135m -o model.tw --target 50MB --calibration-data shakespeare
    """
    config = PackConfig.from_dict(given)
    model = is_model(source)
    if not model:
        check_unpacked(source)
        config.check_for(model)
        pack_scene(source, PackedOut(out, config.force), config)
        return
    check_folder(source)
    fetch_needs(str(source), config.calibration_data, quiet=config.json)
    config.check_for(model)
    check_out(out)
    check_new(Path(out), config.force)
    report = config.report
    told = f"-o and --report are both {out}; give the report a folder of its own"
    require(report is None or Path(report).absolute() != Path(out).absolute(), InputError, told)
    pack_model(source, Path(out), config)
