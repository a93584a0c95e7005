"""``thinwire pack``: a scene of 3D Gaussians, or a model, as small as a target asks for."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.pack_model import (
    ModelOptions,
    check_folder,
    check_out,
    check_unpacked,
    is_model,
    pack_model,
)
from thinwire.cli.pack_scene import SceneOptions, pack_scene
from thinwire.cli.terminal.needs import fetch_needs
from thinwire.cli.terminal.scene_places import PackedOut, check_new
from thinwire.links.shape import SIZES, LinkShape
from thinwire.types import InputError, require

_LARGEST = 1e30  # of a number in any unit
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")
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
Recipe = Annotated[str, typer.Option(metavar="NAME", help="How to code it: thinwire recipes lists them.")]
Target = Annotated[str | None, typer.Option(metavar="SIZE", help="At most so many bytes: 5MB, 800kB.")]
Seconds = Annotated[float | None, typer.Option(metavar="S", help="What --link carries in so many seconds.")]
Link = Annotated[str | None, typer.Option(metavar="LINK", help="The link of --seconds: 10mbit,30ms.")]
Quality = Annotated[
    str | None, typer.Option(metavar="DB", help="At least so near the source's pictures: 40dB.")
]
Cameras = Annotated[
    Path | None,
    typer.Option(
        metavar="PLACE",
        help="From where a scene is looked at: cameras.json, a folder of COLMAP or transforms.json.",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse a scene with a NaN; else its splats are dropped.")
]
MODELS = "For models"
Bits = Annotated[
    float | None,
    typer.Option(
        metavar="B",
        help="Fixed widths of 2 to 8 bits a tensor: so many a weight on average, scales included, 2 to 9.",
        rich_help_panel=MODELS,
    ),
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="A text by name or path, which shows what matters.", rich_help_panel=MODELS
    ),
]
Like = Annotated[
    Path | None,
    typer.Option(
        metavar="OLD", help="Keep the plan of an earlier version's packed file.", rich_help_panel=MODELS
    ),
]
Codes = Annotated[
    bool,
    typer.Option(
        "--codes", help="Write a safetensors file of codes, for publish and follow.", rich_help_panel=MODELS
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Put it in the place of what is there.")]
Report = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Leave the record, pictures of what is left, and a report there."),
]
Credit = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Whose scene it is, for the pictures; by default a licence beside IN."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON, and nothing else, on stdout.")]


def pack(
    source: Source,
    out: Out,
    recipe: Recipe = "thinwire",
    target: Target = None,
    seconds: Seconds = None,
    link: Link = None,
    quality: Quality = None,
    cameras: Cameras = None,
    strict: Strict = False,
    bits: Bits = None,
    calibrate: Calibrate = None,
    like: Like = None,
    codes: Codes = False,
    force: Force = False,
    report: Report = None,
    credit: Credit = None,
    json: Json = False,
) -> None:
    """Pack a scene of 3D Gaussians, or a language model, into few bytes: without any training.

    Of a scene, says what was lost against its own pictures, and what SPZ takes. Of a model, says what a text
    tells of it: its perplexity before and after.

    [bold]Examples[/bold]

    thinwire pack scene.ply -o scene.tw --target 5MB

    thinwire pack scene.spz -o scene.tw --seconds 4 --link 10mbit,30ms --report runs/scene

    thinwire pack room.ply -o room.tw --quality 40dB --cameras cameras.json

    thinwire pack scene.ply -o s3://bucket/scene/ --target 5MB

    thinwire pack smollm2-135m -o model.tw --target 50MB --calibrate shakespeare
    """
    shape = _shape(link, seconds)
    most = _most(target, seconds, shape)
    require(credit is None or report is not None, InputError, "--credit is for pictures; give --report too")
    decibels = None if quality is None else number_of(quality, "--quality", {"db": 1.0, "": 1.0}, "40dB")
    of_scene = SceneOptions(recipe, decibels, strict, credit, cameras)
    of_model = ModelOptions(bits, calibrate, like, codes)
    if is_model(source):
        check_folder(source)
        fetch_needs(str(source), calibrate, quiet=json)
        told = "--recipe, --quality, --cameras, --strict and --credit are for scenes; leave them out"
        require(of_scene == SceneOptions(), InputError, told)
        check_out(out)
        check_new(Path(out), force)
        told = f"-o and --report are both {out}; give the report a folder of its own"
        require(report is None or report.absolute() != Path(out).absolute(), InputError, told)
        pack_model(source, Path(out), most, of_model, shape, report, json)
        return
    check_unpacked(source)
    told = "--bits, --calibrate, --like and --codes are for models; give a model's folder"
    require(of_model == ModelOptions(), InputError, told)
    pack_scene(source, PackedOut(out, force), most, of_scene, shape, report, json)


def number_of(text: str, option: str, units: dict[str, float], example: str) -> float:
    """Return the number that an option gives in one of these units. Errors: ``InputError``.

    >>> number_of("5MB", "--target", SIZES, "5MB")
    5000000.0
    """
    found = _NUMBER.fullmatch(text.strip())
    good = found is not None and found[2].lower() in units and 0 < float(found[1]) < _LARGEST
    require(good, InputError, f"{option} {text!r} is no number with its unit; write it like {example}")
    return float(found[1]) * units[found[2].lower()] if found else math.nan


def _shape(link: str | None, seconds: float | None) -> LinkShape | None:
    both = (link is None) == (seconds is None)
    require(both, InputError, "--seconds and --link go together: --seconds 4 --link 10mbit,30ms")
    shape = None if link is None else LinkShape.parse(link)
    limited = shape is None or shape.rate is not None
    require(limited, InputError, f"--link {link} has no rate; write it like 10mbit,30ms")
    return shape


def _most(target: str | None, seconds: float | None, shape: LinkShape | None) -> int | None:
    if target is not None:
        require(shape is None, InputError, "give one target: --target, or --seconds with --link")
        return int(number_of(target, "--target", SIZES, "5MB"))
    if shape is None or seconds is None or shape.rate is None:
        return None
    left = seconds - shape.delay
    require(
        math.isfinite(left) and left > 0,
        InputError,
        f"--seconds {seconds:g} is within the delay; give more",
    )
    return int(left * shape.rate)
