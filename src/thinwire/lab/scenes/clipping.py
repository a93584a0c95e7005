"""Which splats a format cut to its own range."""

from __future__ import annotations

import numpy as np

from thinwire.assets.splats.scene import Array, Splats

ROOM = {"colours": 0.05, "log_scales": 0.1, "harmonics": 0.15, "positions": 0.01}  # of rounding


def clipped(source: Splats, back: Splats) -> dict[str, int]:
    """Return how many splats of a scene lie outside all that came back of it, by attribute.

    A value beyond the range of what came back, and by more than rounding explains, was cut. Infinite ones are
    counted with odd splats, not here.
    """
    found = {name: _outside(getattr(source, name), getattr(back, name), room) for name, room in ROOM.items()}
    return {name: count for name, count in found.items() if count}


def _outside(values: Array, back: Array, room: float) -> int:
    if not values.size or not back.size:
        return 0
    low, high = float(back.min()) - room, float(back.max()) + room
    out = np.isfinite(values) & ((values < low) | (values > high))
    return int(out.reshape(len(values), -1).any(1).sum())
