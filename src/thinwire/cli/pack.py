"""``thinwire pack``: a scene of 3D Gaussians as small as a target asks for."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.terminal.doing import Doing
from thinwire.cli.terminal.output import print_json, tell
from thinwire.cli.terminal.scene_places import PackedOut
from thinwire.lab.records.holding import holding
from thinwire.links.shape import SIZES, LinkShape
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
    Path, typer.Argument(metavar="IN", help="A .ply, .compressed.ply, .spz or .sog, or a folder of SOG.")
]
Out = Annotated[
    str,
    typer.Option(
        "--out", "-o", metavar="PLACE", help="The packed scene to write; with / at its end, a file a layer."
    ),
]
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
    strict: Strict = False,
    force: Force = False,
    report: Report = None,
    credit: Credit = None,
    json: Json = False,
) -> None:
    """Pack a scene of 3D Gaussians into few bytes: without cameras, photographs or training.

    Says what was lost, against the scene's own pictures, and what SPZ takes.

    [bold]Examples[/bold]

    thinwire pack scene.ply -o scene.tw --target 5MB

    thinwire pack scene.spz -o scene.tw --seconds 4 --link 10mbit,30ms --report runs/scene

    thinwire pack scene.ply -o s3://bucket/scene/ --target 5MB
    """
    shape = _shape(link, seconds)
    most = _most(target, seconds, shape)
    decibels = None if quality is None else number_of(quality, "--quality", {"db": 1.0, "": 1.0}, "40dB")
    require(credit is None or report is not None, InputError, "--credit is for pictures; give --report too")
    place = PackedOut(out, force)
    with nullcontext() if report is None else holding(report, "--report"), Doing(json) as doing:
        # After the checks: a wrong option is refused before torch is even imported.
        from thinwire.lab.scenes.packing import Packing, predicted
        from thinwire.lab.scenes.packing import pack as packed

        data, record = packed(Packing(source, recipe, most, decibels, strict), doing.tell)
        record.config = {"scene": str(source), "recipe": recipe, "target": target, "quality": quality}
        record.config |= {"seconds": seconds, "link": link or "none", "strict": strict}
        if shape is not None and shape.rate:
            record = predicted(record, shape)
        place.write(data)
        if report is not None:
            from thinwire.lab.scenes.reporting import leave_report

            page = leave_report(report, record, source, data, credit, doing.tell)
    if json:
        print_json(record.to_dict())
        return
    _say(source, out, record)
    if report is not None:
        tell(f"report: {page}")


def _say(source: Path, out: str, record: SceneRecord) -> None:
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
