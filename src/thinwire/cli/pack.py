"""``thinwire pack``: a scene of 3D Gaussians, or a model, as small as a target asks for."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.pack_model import ModelOptions, is_model, pack_model
from thinwire.cli.terminal.output import print_json, tell
from thinwire.cli.terminal.places import check_file
from thinwire.links.shape import SIZES, LinkShape
from thinwire.replacing import replacing
from thinwire.types import InputError, require

if TYPE_CHECKING:
    from thinwire.lab.scenes.record import SceneRecord

_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")
ODD = {
    "dropped": "dropped: they hold a NaN or a wrong infinity",
    "endless": "of infinite opacity",
    "flat": "with a scale of zero",
    "turnless": "with a rotation of zero, taken for none",
}
Source = Annotated[
    Path,
    typer.Argument(
        metavar="IN",
        help="A .ply, .compressed.ply, .spz or .sog, a folder of SOG, or a model's folder or name.",
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The packed file to write.")]
Recipe = Annotated[str, typer.Option(metavar="NAME", help="How to code it: thinwire recipes lists them.")]
Target = Annotated[str | None, typer.Option(metavar="SIZE", help="At most so many bytes: 5MB, 800kB.")]
Seconds = Annotated[float | None, typer.Option(metavar="S", help="What --link carries in so many seconds.")]
Link = Annotated[str | None, typer.Option(metavar="LINK", help="The link of --seconds: 10mbit,30ms.")]
Quality = Annotated[
    str | None, typer.Option(metavar="DB", help="At least so near the source's pictures: 40dB.")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse a scene with a NaN; else its splats are dropped.")
]
MODELS = "For models"
Bits = Annotated[
    float | None,
    typer.Option(
        metavar="B",
        help="Fixed widths of 2 to 8 bits a tensor, so many a weight on average, scales included.",
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
Force = Annotated[bool, typer.Option("--force", help="Write over a file that is there.")]
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON, and nothing else, on stdout.")]


def pack(
    source: Source,
    out: Out,
    recipe: Recipe = "thinwire",
    target: Target = None,
    seconds: Seconds = None,
    link: Link = None,
    quality: Quality = None,
    strict: Strict = False,
    bits: Bits = None,
    calibrate: Calibrate = None,
    like: Like = None,
    codes: Codes = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Pack a scene of 3D Gaussians, or a language model, into few bytes: without any training.

    Of a scene, says what was lost against its own pictures, and what SPZ takes. Of a model, says what a text
    tells of it: its perplexity before and after.

    [bold]Examples[/bold]

    thinwire pack scene.ply -o scene.tw --target 5MB

    thinwire pack scene.spz -o scene.tw --seconds 4 --link 10mbit,30ms

    thinwire pack smollm2-135m -o model.tw --target 50MB --calibrate shakespeare
    """
    shape = _shape(link, seconds)
    most = _most(target, seconds, shape)
    asked = ModelOptions(bits, calibrate, like, codes)
    if is_model(source):
        scenic = recipe != "thinwire" or quality is not None or strict
        require(not scenic, InputError, "--recipe, --quality and --strict are for scenes; leave them out")
        check_new(out, force)
        pack_model(source, out, most, asked, shape, None, json)
        return
    told = "--bits, --calibrate, --like and --codes are for models; give a model's folder"
    require(asked == ModelOptions(), InputError, told)
    decibels = None if quality is None else number_of(quality, "--quality", {"db": 1.0, "": 1.0}, "40dB")
    check_new(out, force)
    # After the checks: a wrong option is refused before torch is even imported.
    from thinwire.lab.scenes.packing import Packing, predicted
    from thinwire.lab.scenes.packing import pack as packed

    data, record = packed(Packing(source, recipe, most, decibels, strict))
    if shape is not None and shape.rate:
        record = predicted(record, shape.rate, shape.delay)
    with replacing(out) as part:
        part.write_bytes(data)
    if json:
        print_json(record.to_dict())
        return
    _say(source, out, record)


def _say(source: Path, out: Path, record: SceneRecord) -> None:
    """Print what became of a scene, and what was lost."""
    streams = ", ".join(f"{name} {nbytes}" for name, nbytes in record.streams.items())
    tell(f"{source}: {record.splats} splats, {record.source_nbytes} bytes")
    tell(f"{out}: {record.packed_nbytes} bytes ({streams})")
    for i, layer in enumerate(record.layers[:-1], 1):
        tell(f"layer {i}: {layer.nbytes} bytes, {layer.splats} splats, {_decibels(layer.psnr_db)}")
    tell(f"{_decibels(record.psnr_db)}, SSIM {record.ssim or 0:.4f} to the source's own pictures")
    for rival in record.rivals:
        tell(f"{rival.name}: {rival.nbytes} bytes, {_decibels(rival.psnr_db)}")
    for note in [*record.notes, *_odd(record.odd)]:
        tell(f"note: {note}")


def _odd(odd: dict[str, int]) -> list[str]:
    return [f"{count} splats {ODD[kind]}" for kind, count in odd.items() if count]


def _decibels(decibels: float | None) -> str:
    return "equal" if decibels is None else f"PSNR {decibels:.2f} dB"


def number_of(text: str, option: str, units: dict[str, float], example: str) -> float:
    """Return the number that an option gives in one of these units. Errors: ``InputError``.

    >>> number_of("5MB", "--target", SIZES, "5MB")
    5000000.0
    """
    found = _NUMBER.fullmatch(text.strip())
    good = found is not None and found[2].lower() in units and float(found[1]) > 0
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


def check_new(path: Path, force: bool) -> None:
    """Raise ``InputError`` where ``path`` cannot be written, or is there and not to be written over."""
    check_file(path, "-o")
    require(force or not path.exists(), InputError, f"{path} is there; give --force to write over it")
