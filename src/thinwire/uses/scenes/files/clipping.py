"""What formats of others do not hold: splats beyond their ranges come back clipped, or somewhere else.

The ranges are those of gaussforge 0.6 as measured: what is written at their ends reads back, beyond not.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from thinwire.uses.scenes.files.foreign import SPZ as AXES
from thinwire.uses.scenes.files.foreign import turned
from thinwire.uses.scenes.scene import Splats

NAMES = {"spz": "SPZ", "compressed.ply": "compressed .ply"}
# Half a step of what is coded may be beyond each end: a value there is only rounded.
SPZ = {
    "positions": (-2048.0, 2048.0),  # 24 bits of 1/4096; beyond, they begin anew at the other end
    "log_scales": (-10 - 1 / 32, 5.9375 + 1 / 32),
    "opacities": (-math.log(509), math.log(509)),  # then no more than half a step from 0 or from 1
    "colours": (-3.34, 3.34),
    "harmonics": (-1 - 1 / 256, 1.0),
}
COMPRESSED_PLY = {"log_scales": (-20.0, 20.0), "opacities": (-6.91, 6.91), "harmonics": (-4.0, 4.0)}
CHUNK, PLACES = 256, 2047  # splats of a compressed .ply that share a range, and its steps
STRAY = 8.0  # times as far out as nearly all
RANGES = {"spz": SPZ, "compressed.ply": COMPRESSED_PLY}


def beyond(splats: Splats, form: str) -> dict[str, int]:
    """Return how many splats are beyond what a format holds, by attribute and ``splats`` in all.

    Infinite opacities are not counted where a format has such; empty where all are within.

    >>> beyond(Splats.of([[0, 0, 0], [3000, 0, 0]], opacities=[9, 1]), "spz")
    {'positions': 1, 'opacities': 1, 'splats': 2}
    """
    found, some = dict[str, int](), np.zeros(splats.count, bool)
    splats = turned(splats, AXES) if form == "spz" else splats
    for name, (low, high) in RANGES.get(form, {}).items():
        values: npt.NDArray[np.float32] = getattr(splats, name).reshape(splats.count, -1)
        out = (values < low) | (values > high)
        if form == "spz" and name == "opacities":
            out &= np.isfinite(values)
        over = out.any(1)
        if over.any():
            found[name], some = int(over.sum()), some | over
    return found | ({"splats": int(some.sum())} if some.any() else {})


def told_beyond(splats: Splats, form: str) -> list[str]:
    """Return a sentence on the splats that a format does not hold as they are; none where it holds all.

    >>> told_beyond(Splats.of([[3000, 0, 0]]), "spz")
    ['SPZ clips 1 of 1 splats that are beyond its ranges: positions 1 (they come back elsewhere)']
    """
    strays = _strays(splats) if form == "compressed.ply" else []
    found = beyond(splats, form)
    if not found:
        return strays
    count = found.pop("splats")
    parts = [f"{name.replace('_', '-')} {n}" for name, n in found.items()]
    if form == "spz" and "positions" in found:
        parts[0] += " (they come back elsewhere)"
    told = f"{NAMES[form]} clips {count} of {splats.count} splats that are beyond its ranges"
    return [f"{told}: {', '.join(parts)}", *strays]


def _strays(splats: Splats) -> list[str]:
    """Return what splats far out do to others whose range of places they share."""
    places = splats.positions.astype(np.float64)
    away = np.linalg.norm(places - np.median(places, axis=0), axis=1)
    far = int((away > STRAY * np.quantile(away, 0.95)).sum())
    if not far:
        return []
    beside, step = min(far * (CHUNK - 1), splats.count - far), away.max() / PLACES
    told = f"{far} splats are far out, and in compressed .ply up to {beside} others share ranges with them"
    return [f"{told}: their places are {step:.2g} apart; write .ply to keep them"]
