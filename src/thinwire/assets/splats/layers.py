"""A scene in layers: a coarse one first, then the splats that matter most, then the others.

The first layer is a scene of merged splats, in a few per cent of the bytes. The next ones bring splats that
stay, the best seen first. In place of those still to come, a layer may have merged ones, until the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial

import numpy as np
import numpy.typing as npt

from thinwire.assets.splats import search, thinwire
from thinwire.assets.splats.decoding import decode_part
from thinwire.assets.splats.merging import merged
from thinwire.assets.splats.part import Layer, Part
from thinwire.assets.splats.scene import Splats
from thinwire.assets.splats.thinwire import Analysis
from thinwire.assets.splats.view.cameras import SIZE
from thinwire.types import InputError, PayloadError, require

SHARES = (0.35, 0.7)  # of the splats that have come after each layer between the first and the last
STAND_INS = (0.06, 0.03)  # of all bytes: what the first layers spend on splats that go again
MERGED_NBYTES = 6.0  # of a merged splat, about
EMPTY_NBYTES = 500  # of a part without splats, about
FEWEST, FEWEST_MERGED = 2000, 50  # splats of a scene that is worth layers, and of a layer


def divided(scene: Analysis) -> list[npt.NDArray[np.intp]]:
    """Return the splats that come with each layer, the best seen first; none with the first."""
    count = scene.splats.count
    if count < FEWEST:
        return [np.arange(count)]
    order = np.argsort(-scene.seen.squares, kind="stable")
    parts = np.split(order, [int(share * count) for share in SHARES])
    return [order[:0], *(np.sort(part) for part in parts)]


def stand_ins(scene: Analysis, nbytes: int, size: int = SIZE) -> list[Part]:
    """Return what the first layers show in place of splats to come, in their shares of ``nbytes`` in all.

    None where so few bytes say nothing.
    """
    come = divided(scene)
    rests = [np.concatenate(come[i + 1 :]) for i in range(len(STAND_INS) if len(come) > 1 else 0)]
    found = [
        _fewer(scene, rest, int(share * nbytes), size) for rest, share in zip(rests, STAND_INS, strict=False)
    ]
    return [] if None in found else [part for part in found if part is not None]


def _fewer(scene: Analysis, rest: npt.NDArray[np.intp], most: int, size: int) -> Part | None:
    """Return these splats merged to as many as go into ``most`` bytes; none where that is hardly any."""
    splats, weights = scene.splats.take(rest), scene.seen.weights[rest]
    count = int((most - EMPTY_NBYTES) / MERGED_NBYTES)
    while count >= FEWEST_MERGED:
        own = Analysis.of(merged(splats, weights, scene.frame.radius, count), size)
        with suppress(InputError):  # even the coarsest steps take more
            return search.to_budget(partial(thinwire.encode, own), _nbytes, most)
        count //= 2
    return None


def _nbytes(part: Part) -> int:
    return part.nbytes


def encode_layers(scene: Analysis, slope: float, shown: Sequence[Part]) -> list[Layer]:
    """Return a scene's layers at a slope; ``shown`` are the first ones' stand-ins, or none: one layer."""
    found, come = list[Layer](), divided(scene)
    for i, which in enumerate(come if shown else [np.sort(np.concatenate(come))]):
        stays = thinwire.encode(scene, slope, which) if len(which) else None
        found.append(Layer(stays, shown[i] if i < len(shown) else None))
    return found


def shown_after(layers: Sequence[Layer]) -> Splats:
    """Return the scene that these layers, the first ones of a file, show. Errors: ``PayloadError``."""
    parts = [layer.stays for layer in layers] + [layers[-1].stand_in]
    scenes = [decode_part(part) for part in parts if part is not None]
    require(len({scene.bands for scene in scenes}) == 1, PayloadError, "layers of different bands, or none")
    if len(scenes) == 1:
        return scenes[0]
    names = [f.name for f in fields(Splats)]
    return Splats(**{name: np.concatenate([getattr(scene, name) for scene in scenes]) for name in names})
