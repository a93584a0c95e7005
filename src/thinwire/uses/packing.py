"""The options of ``thinwire pack``: what a target asks for, and what is of scenes or of models alone."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from thinwire.links.shape import SIZES, LinkShape
from thinwire.runs import options as shared
from thinwire.runs.options import Options, flag, option
from thinwire.types import InputError, require

MODELS = "For models"
SCENES_ONLY = ("recipe", "quality", "cameras", "strict", "refine", "credit")
_LARGEST = 1e30  # of a number in any unit
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")


@dataclass(frozen=True)
class PackConfig(Options):
    """How small, how near, and where to leave a report."""

    recipe: str = option("thinwire", "", "How to code it: thinwire recipes lists them.", metavar="NAME")
    target: str | None = option(None, "", "At most so many bytes: 5MB, 800kB.", metavar="SIZE")
    seconds: float | None = option(None, "", "What --link carries in so many seconds.", metavar="S")
    link: str | None = option(None, "", "The link of --seconds: 10mbit,30ms.", metavar="LINK")
    quality: str | None = option(None, "", "At least so near the source's pictures: 40dB.", metavar="DB")
    cameras: str | None = option(
        None,
        "",
        "Cameras that see the scene: cameras.json, a folder of COLMAP or transforms.json.",
        metavar="PLACE",
    )
    strict: bool = option(False, "", "Refuse a scene with a NaN; else its splats are dropped.")
    refine: bool = option(
        False, "", "Fewer splats that fit the scene's own pictures again: minutes, for fewer bytes."
    )
    bits: float | None = option(
        None,
        MODELS,
        "Fixed widths of 2 to 8 bits a tensor: so many a weight on average, scales included, 2 to 9.",
        metavar="B",
    )
    calibration_data: str | None = option(
        None, MODELS, "A text by name or path, which shows what matters.", metavar="TEXT", old="calibrate"
    )
    device: str = shared.device(MODELS)
    dtype: str = shared.compute_dtype(MODELS, "fp32")
    base: str | None = option(
        None, MODELS, "Keep the plan of an earlier version's packed file.", metavar="OLD", old="like"
    )
    codes: bool = option(False, MODELS, "Write a safetensors file of codes, for publish and follow.")
    force: bool = shared.force()
    report: str | None = option(
        None, "", "Leave the record, pictures of what is left, and a report there.", metavar="DIR"
    )
    credit: str | None = option(
        None, "", "The scene's credit, for the pictures; by default a licence beside IN.", metavar="TEXT"
    )
    json: bool = shared.printed("the record as JSON")

    def validate(self) -> None:
        """Raise ``InputError`` for targets that cannot be, and for a credit without pictures."""
        _ = self.most, self.decibels
        shown = self.credit is None or self.report is not None
        require(shown, InputError, "--credit is for pictures; give --report too")

    def check_for(self, model: bool) -> None:
        """Raise ``InputError`` for an option that is of scenes alone, where this is a ``model``, or not."""
        names = SCENES_ONLY if model else self.names(panel=MODELS)
        whose = "scenes; leave them out" if model else "models; give a model's folder"
        *others, last = map(flag, names)
        told = f"{', '.join(others)} and {last} are for {whose}"
        plain = all(getattr(self, f.name) == f.default for f in dataclasses.fields(self) if f.name in names)
        require(plain, InputError, told)

    @property
    def decibels(self) -> float | None:
        """What ``quality`` asks for, in dB."""
        if self.quality is None:
            return None
        return number_of(self.quality, "--quality", {"db": 1.0, "": 1.0}, "40dB")

    @property
    def shape(self) -> LinkShape | None:
        """The link that is to carry what is packed."""
        both = (self.link is None) == (self.seconds is None)
        require(both, InputError, "--seconds and --link go together: --seconds 4 --link 10mbit,30ms")
        shape = None if self.link is None else LinkShape.parse(self.link)
        limited = shape is None or shape.rate is not None
        require(limited, InputError, f"--link {self.link} has no rate; write it like 10mbit,30ms")
        return shape

    @property
    def most(self) -> int | None:
        """The bytes that a packed file may take."""
        shape = self.shape
        if self.target is not None:
            require(shape is None, InputError, "give one target: --target, or --seconds with --link")
            return int(number_of(self.target, "--target", SIZES, "5MB"))
        if shape is None or self.seconds is None or shape.rate is None:
            return None
        left = self.seconds - shape.delay
        require(left > 0, InputError, f"--seconds {self.seconds:g} is within the delay; give more")
        return int(left * shape.rate)


def number_of(text: str, option: str, units: dict[str, float], example: str) -> float:
    """Return the number that an option gives in one of these units. Errors: ``InputError``.

    >>> number_of("5MB", "--target", SIZES, "5MB")
    5000000.0
    """
    found = _NUMBER.fullmatch(text.strip())
    good = found is not None and found[2].lower() in units and 0 < float(found[1]) < _LARGEST
    require(good, InputError, f"{option} {text!r} is no number with its unit; write it like {example}")
    return float(found[1]) * units[found[2].lower()] if found else math.nan
