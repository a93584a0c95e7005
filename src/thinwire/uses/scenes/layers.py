"""A scene in layers: a coarse one first, then the splats that matter most, then the others, then finer steps.

The first layer is a scene of merged splats, in a few per cent of the bytes. The next ones bring splats that
stay, the best seen first, in coarse steps; the last narrows the steps of all. In place of splats still to
come, a layer may have merged ones, until the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from thinwire.types import InputError, PayloadError, require
from thinwire.uses.scenes import search, thinwire
from thinwire.uses.scenes.coded import finer_part
from thinwire.uses.scenes.decoding import decode_layers
from thinwire.uses.scenes.merging import merged
from thinwire.uses.scenes.part import Layer, Part
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.thinwire import Analysis

LAYERS = 4  # that a scene comes in
SHARES: dict[int, tuple[float, ...]] = {1: (), 2: (1.0,), 3: (1.0,), 4: (0.35, 1.0), 5: (0.25, 0.6, 1.0)}
FINER = 3  # layers from which on the last one is for finer steps
STAND_INS = (0.05, 0.03, 0.03)  # of all bytes: what layers spend on splats that go again
MERGED_NBYTES = 6.0  # of a merged splat, about
EMPTY_NBYTES = 500  # of a part without splats, about
FEWEST, FEWEST_MERGED = 2000, 50  # splats of a scene that is worth layers, and of a layer


def divided(scene: Analysis, layers: int) -> list[npt.NDArray[np.intp]]:
    """Return the splats that come with each of so many layers, the best seen first; none with the first."""
    count = scene.splats.count
    if count < FEWEST or layers < 2:
        return [np.arange(count)]
    order = np.argsort(-scene.seen.squares, kind="stable")
    parts = np.split(order, [int(share * count) for share in SHARES[layers][:-1]])
    return [order[:0], *(np.sort(part) for part in parts)]


def stand_ins(scene: Analysis, nbytes: int, layers: int = LAYERS) -> list[Part]:
    """Return what the first layers show in place of splats to come, in their shares of ``nbytes`` in all.

    None where so few bytes say nothing.
    """
    come = divided(scene, layers)
    rests = [np.concatenate(come[i + 1 :]) for i in range(len(come) - 1)]
    found = [_fewer(scene, rest, int(share * nbytes)) for rest, share in zip(rests, STAND_INS, strict=False)]
    return [] if None in found else [part for part in found if part is not None]


def _fewer(scene: Analysis, rest: npt.NDArray[np.intp], most: int) -> Part | None:
    """Return these splats merged to as many as go into ``most`` bytes; none where that is hardly any."""
    splats, weights = scene.splats.take(rest), scene.seen.weights[rest]
    count = int((most - EMPTY_NBYTES) / MERGED_NBYTES)
    while count >= FEWEST_MERGED:
        own = Analysis.through(scene.views, merged(splats, weights, scene.frame.radius, count))
        with suppress(InputError):  # even the coarsest steps take more
            return search.to_budget(partial(thinwire.encode, own), _nbytes, most)
        count //= 2
    return None


def _nbytes(part: Part) -> int:
    return part.nbytes


def encode_layers(scene: Analysis, slope: float, shown: Sequence[Part], layers: int = LAYERS) -> list[Layer]:
    """Return a scene's layers at a slope; ``shown`` are the first ones' stand-ins, or none: one layer."""
    if not shown:
        return [Layer(thinwire.encode(scene, slope))]
    fine = [thinwire.quantised(scene, slope, which) for which in divided(scene, layers) if len(which)]
    most = {group: scene.most(group) for group in scene.channels}
    coarse = [coded.coarser(most) for coded in fine] if layers >= FINER else fine
    stays = [None, *(coded.part() for coded in coarse)]
    found = [Layer(part, stand_in) for part, stand_in in zip_longest(stays, shown)]
    return [*found, Layer(finer=finer_part(coarse, fine))] if layers >= FINER else found


def shown_after(layers: Sequence[Layer]) -> Splats:
    """Return the scene that these layers, the first ones of a file, show. Errors: ``PayloadError``."""
    held = decode_layers(layers)
    found = [scene for scene in (*(stays for stays, _ in held), held[-1][1]) if scene is not None]
    same = len({scene.bands for scene in found}) == 1
    require(same, PayloadError, "layers of different bands, or none")
    if len(found) == 1:
        return found[0]
    names = [f.name for f in fields(Splats)]
    return Splats(**{name: np.concatenate([getattr(scene, name) for scene in found]) for name in names})
