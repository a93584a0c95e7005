"""``.splat`` files: 32 bytes a splat, and nothing else. They hold no harmonics.

Source: https://github.com/antimatter15/splat [quoted], as splat-transform and gaussforge read it as well.
"""

from __future__ import annotations

import numpy as np

from thinwire.types import PayloadError, require
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view.harmonics import CONSTANT

ROW = np.dtype([("place", "<f4", 3), ("scale", "<f4", 3), ("rgba", "u1", 4), ("turn", "u1", 4)])


def read_splat(data: bytes | memoryview) -> Splats:
    """Return the scene in a ``.splat``. Errors: ``PayloadError``.

    >>> read_splat(bytes(24) + bytes([128, 128, 128, 255, 255, 128, 128, 128])).count
    1
    """
    told = f"{len(data)} bytes are no whole number of splats of {ROW.itemsize}: it was cut short"
    require(len(data) % ROW.itemsize == 0, PayloadError, told)
    rows = np.frombuffer(data, ROW)
    shown = rows["rgba"] / 255.0
    alpha = np.clip(shown[:, 3], 0.5 / 255, 1 - 0.5 / 255)  # 0 and 255 are within half a step of it
    with np.errstate(divide="ignore", invalid="ignore"):  # sizes of zero are flat, others below it damaged
        scales = np.log(rows["scale"])
    return Splats.of(
        rows["place"],
        log_scales=scales,
        rotations=(rows["turn"].astype(np.float32) - 128) / 128,
        opacities=np.log(alpha / (1 - alpha)),
        colours=(shown[:, :3] - 0.5) / CONSTANT,
    )
