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

from thinwire import spec
from thinwire.types import InputError, PayloadError, require
from thinwire.uses.scenes import coded, importance_coder, mesongs, search
from thinwire.uses.scenes.coded import Coded, finer_part
from thinwire.uses.scenes.importance_coder import Analysis
from thinwire.uses.scenes.merging import merged
from thinwire.uses.scenes.part import Layer, Part
from thinwire.uses.scenes.scene import Splats


def decode_part(part: Part) -> Splats:
    """Return the scene that a part stands for. Errors: ``PayloadError``."""
    found = _read(part)
    return found.splats() if isinstance(found, Coded) else found


def decode_layers(layers: Sequence[Layer]) -> list[tuple[Splats | None, Splats | None]]:
    """Return what each layer holds: splats that stay, in the finest steps of all these layers, and stand-ins.

    Errors: ``PayloadError``.
    """
    stays = list[Coded | Splats | None]()
    for layer in layers:
        if layer.finer is not None:
            stays = _finer(stays, layer.finer)
        stays.append(_read(layer.stays) if layer.stays is not None else None)
    whole = [found.splats() if isinstance(found, Coded) else found for found in stays]
    stand_ins = [None if layer.stand_in is None else decode_part(layer.stand_in) for layer in layers]
    return list(zip(whole, stand_ins, strict=True))


def _finer(stays: Sequence[Coded | Splats | None], part: Part) -> list[Coded | Splats | None]:
    """Return what stays with the steps of our coder's splats narrowed by a part."""
    _check(part, ["positions", *coded.widths(part.bands)])
    require(part.codec == coded.NAME, PayloadError, f"finer steps by {part.codec!r:.40}; update thinwire")
    narrowed = iter(coded.refined([found for found in stays if isinstance(found, Coded)], part))
    return [next(narrowed) if isinstance(found, Coded) else found for found in stays]


def _read(part: Part) -> Coded | Splats:
    if part.codec in coded.NAMES:
        _check(part, ["positions", "classes", *coded.widths(part.bands)])
        return coded.of_part(part)
    require(part.codec == mesongs.NAME, PayloadError, f"a part by {part.codec!r:.40}; update thinwire")
    book = ["codebook", "indices"] if part.bands else []
    _check(part, ["positions", "attributes", "log_scales", "ranges", *book])
    coder: mesongs.MesonGS = spec.parse(str(part.about.get("spec")), {"MesonGS": mesongs.MesonGS})
    return coder.decode(part)


def _check(part: Part, streams: Sequence[str]) -> None:
    missing = [name for name in streams if name not in part.streams]
    require(not missing, PayloadError, f"a part without {', '.join(missing)}: it is damaged")


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
            return search.to_budget(partial(importance_coder.encode, own), _nbytes, most)
        count //= 2
    return None


def _nbytes(part: Part) -> int:
    return part.nbytes


def encode_layers(scene: Analysis, slope: float, shown: Sequence[Part], layers: int = LAYERS) -> list[Layer]:
    """Return a scene's layers at a slope; ``shown`` are the first ones' stand-ins, or none: one layer."""
    if not shown:
        return [Layer(importance_coder.encode(scene, slope))]
    fine = [importance_coder.quantised(scene, slope, which) for which in divided(scene, layers) if len(which)]
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
