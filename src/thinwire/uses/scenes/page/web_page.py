"""Write the page of a scene: its code, and each layer behind it in the order in which it is shown.

A browser runs what has come of a page, so over a slow link the first layer is on the screen before the next
one is there.
"""

from __future__ import annotations

import base64
import html
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.types import PayloadError, require
from thinwire.uses.scenes.code import orientations
from thinwire.uses.scenes.code.morton import PositionGrid, morton
from thinwire.uses.scenes.layers import decode_layers
from thinwire.uses.scenes.part import Layer
from thinwire.uses.scenes.scene import Splats, cleaned
from thinwire.uses.scenes.view.cameras import ANGLE, MARGIN, SceneFrame
from thinwire.uses.scenes.view.project import BEYOND, LEAST_ALPHA, WIDER
from thinwire.uses.scenes.view.render import MOST_ALPHA

SHADERS = ("splat.vert", "splat.frag", "screen.vert", "screen.frag")
WORKERS = ("decode.js", "sort.js")
SCRIPTS = ("draw.js", "orbit.js", "main.js")


@dataclass(frozen=True, eq=False)
class _Shown:
    """What a layer brings: splats that stay, and others that go with the next layer."""

    stays: Splats | None
    stand_in: Splats | None = None

    @property
    def scenes(self) -> list[Splats]:
        return [scene for scene in (self.stays, self.stand_in) if scene is not None]


def page_of(layers: Sequence[Layer], title: str, credit: str = "") -> str:
    """Return a page that shows a packed scene layer by layer, and needs no other file.

    Splats come in their finest steps at once: a layer of finer steps has no turn of its own.
    ``credit`` stands on every picture. Errors: ``PayloadError`` for layers that are damaged.
    """
    sound = [[scene and cleaned(scene)[0] for scene in held] for held in decode_layers(layers)]
    return _page([layer for layer in (_Shown(*held) for held in sound) if layer.scenes], title, credit)


def page_of_scene(splats: Splats, title: str, credit: str = "") -> str:
    """Return a page that shows a scene at once.

    >>> "<title>one splat</title>" in page_of_scene(Splats.of(np.zeros((1, 3))), "one splat")
    True
    """
    return _page([_Shown(splats)], title, credit)


def _page(shown: Sequence[_Shown], title: str, credit: str) -> str:
    scenes = [scene for layer in shown for scene in layer.scenes]
    bands = {scene.bands for scene in scenes}
    require(len(bands) == 1, PayloadError, "layers of different bands, or none")
    coding = PageCoding.of(_frame(shown), scenes)
    given = {name: _source(name) for name in (*SHADERS, *WORKERS, "style.css")}
    values = {name.replace(".", "_"): text for name, text in given.items()}
    values |= {"title": html.escape(title), "credit": html.escape(credit)}
    values["scene"] = _script_json(_about(shown, coding, scenes[0].harmonics.shape[1]))
    values["code"] = "\n".join(map(_source, SCRIPTS))
    values["layers"] = "\n".join(f"<script>{_pushed(layer, coding)}</script>" for layer in shown)
    return Template(_source("page.html")).substitute(values)


def _frame(shown: Sequence[_Shown]) -> SceneFrame:
    """Return the frame of all that is there in the end."""
    last = [layer.stays for layer in shown] + [shown[-1].stand_in]
    scenes = [scene for scene in last if scene is not None]
    names = ("positions", "opacities", "log_scales")
    return SceneFrame.of(
        Splats.of(**{n: np.concatenate([getattr(scene, n) for scene in scenes]) for n in names})
    )


def _about(shown: Sequence[_Shown], coding: PageCoding, coefficients: int) -> dict[str, Any]:
    """Return what the page's code is told about a scene and about how the renderer draws."""
    stay, most = 0, 0
    for layer in shown:
        most = max(most, stay + sum(scene.count for scene in layer.scenes))
        stay += layer.stays.count if layer.stays else 0
    defines = {"WIDER": WIDER, "LEAST_ALPHA": LEAST_ALPHA, "MOST_ALPHA": MOST_ALPHA, "BEYOND": BEYOND}
    return {
        "layers": len(shown),
        "most": most,
        "coefficients": coefficients,
        "axes": {name: axes.ravel().tolist() for name, axes in coding.axes.items()},
        "frame": {"middle": coding.frame.middle, "radius": coding.frame.radius},
        "camera": {"angle": ANGLE, "margin": MARGIN},
        "defines": "".join(f"#define {name} {value!r}\n" for name, value in defines.items()),
    }


def _pushed(layer: _Shown, coding: PageCoding) -> str:
    """Return the call that gives the page a layer."""
    planes = [coded(scene, coding) for scene in layer.scenes]
    parts = [
        {"count": scene.count, "stays": scene is layer.stays, "channels": [plane.about for plane in own]}
        for scene, own in zip(layer.scenes, planes, strict=True)
    ]
    data = base64.b64encode(deflated([plane for own in planes for plane in own])).decode()
    return f'page.push({_script_json(parts)},"{data}");'


def _script_json(value: Any) -> str:
    """Return JSON that no script element ends in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _source(name: str) -> str:
    return (resources.files("thinwire.uses.scenes.page") / "web" / name).read_text(encoding="utf-8")


Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]
# Finer than a screen's 256 levels show: about 50 dB to the pictures of what is coded.
STEPS = {
    "positions": 2.0**-13,  # of the frame's radius
    "log_scales": 1 / 16,
    "rotations": 1 / 64,
    "opacities": 1 / 255,  # of alpha, not of its logit
    "colours": 1 / 40,
    "harmonics": 1 / 32,
}
FAR = 500.0  # radii: what lies farther out is drawn here
SMALL, LARGE = -23.0, 23.0  # natural logarithms of scales
BRIGHT = 1000.0
ALONG = ("colours", "harmonics")  # attributes whose channels vary together


@dataclass(frozen=True, eq=False)
class PageCoding:
    """What all layers of a page share: where the scene is, and axes [d, d] that set channels apart."""

    frame: SceneFrame
    axes: dict[str, Floats]

    @classmethod
    def of(cls, frame: SceneFrame, scenes: Sequence[Splats]) -> PageCoding:
        """Return the coding of scenes of the same bands."""
        values = [_colours(scene) for scene in scenes]
        return cls(frame, {name: _axes(np.concatenate([v[name] for v in values])) for name in ALONG})


@dataclass(frozen=True, eq=False)
class Plane:
    """A channel as bytes: its numbers are ``low`` + ``step`` times what ``planes`` planes say."""

    low: float
    step: float
    planes: int
    differences: bool
    data: bytes

    @classmethod
    def of(cls, values: Floats, step: float) -> Plane:
        """Return the channel of values [n] in steps, whichever way takes fewer bytes."""
        low = float(values.min())
        codes = np.rint((values - low) / step).astype(np.int64)
        difference = np.diff(codes, prepend=0)
        zigzag: Codes = np.where(difference < 0, -2 * difference - 1, 2 * difference)
        ways = [_planes(codes), _planes(zigzag)]
        best = int(np.argmin([_ideal_nbytes(way) for way in ways]))
        return cls(low, step, len(ways[best]), best == 1, ways[best].tobytes())

    def moved(self, origin: float, unit: float) -> Plane:
        """Return the channel of values that are ``origin`` + ``unit`` times these."""
        return replace(self, low=origin + unit * self.low, step=unit * self.step)

    @property
    def about(self) -> list[float]:
        """What a browser reads it by, in as many digits as float32 has."""
        return [float(f"{self.low:.9g}"), float(f"{self.step:.9g}"), self.planes, int(self.differences)]


def coded(splats: Splats, coding: PageCoding) -> list[Plane]:
    """Return the channels of a scene: positions, scales, rotations' x, y, z, alpha, colours, harmonics."""
    middle, radius = np.array(coding.frame.middle), coding.frame.radius
    near = np.clip((splats.positions - middle) / radius, -FAR, FAR).astype(np.float32)
    order = np.argsort(morton(PositionGrid.cubic(near, STEPS["positions"]).cells(near)), kind="stable")
    splats = splats.take(order)
    low, high = SMALL + min(0.0, math.log(radius)), LARGE + max(0.0, math.log(radius))
    rotations, scales = orientations.smallest(splats.rotations, np.clip(splats.log_scales, low, high))
    with np.errstate(over="ignore"):
        alpha = 1 / (1 + np.exp(-splats.opacities.astype(np.float64)))
    groups = {
        "positions": near[order].astype(np.float64),
        "log_scales": scales.astype(np.float64),
        "rotations": rotations[:, 1:],
        "opacities": alpha[:, None],
    }
    groups |= {name: values @ coding.axes[name] for name, values in _colours(splats).items()}
    planes = [Plane.of(x, STEPS[name]) for name, values in groups.items() for x in values.T]
    return [plane.moved(x, radius) for plane, x in zip(planes[:3], middle, strict=True)] + planes[3:]


def deflated(planes: Sequence[Plane]) -> bytes:
    """Return channels one behind the other, as raw DEFLATE."""
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_FILTERED)
    return b"".join([*(coder.compress(plane.data) for plane in planes), coder.flush()])


def _colours(splats: Splats) -> dict[str, Floats]:
    found = {"colours": splats.colours, "harmonics": splats.harmonics.reshape(splats.count, -1)}
    return {name: np.clip(x, -BRIGHT, BRIGHT).astype(np.float64) for name, x in found.items()}


def _axes(values: Floats) -> Floats:
    """Return axes [d, d] as columns along which values [n, d] do not vary together."""
    apart = values - values.mean(0)
    return np.asarray(np.linalg.eigh(apart.T @ apart)[1].round(4), np.float64)


def _planes(codes: Codes) -> npt.NDArray[np.uint8]:
    """Return the bytes of numbers [n] as planes [k, n], the lowest first."""
    count = max(1, (int(codes.max()).bit_length() + 7) // 8)
    return np.stack([(codes >> 8 * k & 255).astype(np.uint8) for k in range(count)])


def _ideal_nbytes(planes: npt.NDArray[np.uint8]) -> float:
    """Return the bytes that a coder needs which knows how often each byte of a plane is there."""
    counts: Any = np.stack([np.bincount(plane, minlength=256) for plane in planes])
    return float((counts * np.log2(planes.shape[1] / np.maximum(counts, 1))).sum() / 8)
