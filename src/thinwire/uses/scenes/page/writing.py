"""Write the page of a scene: its code, and each layer behind it in the order in which it is shown.

A browser runs what has come of a page, so over a slow link the first layer is on the screen before the next
one is there.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from string import Template
from typing import Any

import numpy as np

from thinwire.types import PayloadError, require
from thinwire.uses.scenes.decoding import decode_layers
from thinwire.uses.scenes.page.chunk import Coding, coded, deflated
from thinwire.uses.scenes.part import Layer
from thinwire.uses.scenes.scene import Splats, cleaned
from thinwire.uses.scenes.view.cameras import ANGLE, MARGIN, Frame
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
    coding = Coding.of(_frame(shown), scenes)
    given = {name: _source(name) for name in (*SHADERS, *WORKERS, "style.css")}
    values = {name.replace(".", "_"): text for name, text in given.items()}
    values |= {"title": html.escape(title), "credit": html.escape(credit)}
    values["scene"] = _script_json(_about(shown, coding, scenes[0].harmonics.shape[1]))
    values["code"] = "\n".join(map(_source, SCRIPTS))
    values["layers"] = "\n".join(f"<script>{_pushed(layer, coding)}</script>" for layer in shown)
    return Template(_source("page.html")).substitute(values)


def _frame(shown: Sequence[_Shown]) -> Frame:
    """Return the frame of all that is there in the end."""
    last = [layer.stays for layer in shown] + [shown[-1].stand_in]
    scenes = [scene for scene in last if scene is not None]
    names = ("positions", "opacities", "log_scales")
    return Frame.of(Splats.of(**{n: np.concatenate([getattr(scene, n) for scene in scenes]) for n in names}))


def _about(shown: Sequence[_Shown], coding: Coding, coefficients: int) -> dict[str, Any]:
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


def _pushed(layer: _Shown, coding: Coding) -> str:
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
