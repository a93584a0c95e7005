"""A part to a scene, whichever coder made it."""

from __future__ import annotations

from thinwire import spec
from thinwire.assets.splats import mesongs, thinwire
from thinwire.assets.splats.part import Part
from thinwire.assets.splats.scene import Splats
from thinwire.types import PayloadError, require


def decode_part(part: Part) -> Splats:
    """Return the scene that a part stands for. Errors: ``PayloadError``."""
    missing = [name for name in _streams(part) if name not in part.streams]
    require(not missing, PayloadError, f"a part without {', '.join(missing)}: it is damaged")
    if part.codec == thinwire.NAME:
        return thinwire.decode(part)
    require(part.codec == mesongs.NAME, PayloadError, f"a part by {part.codec!r:.40}; update thinwire")
    text = str(part.about.get("spec"))
    coder: mesongs.MesonGS = spec.parse(text, {"MesonGS": mesongs.MesonGS})
    return coder.decode(part)


def _streams(part: Part) -> list[str]:
    if part.codec == thinwire.NAME:
        return ["positions", "classes", *thinwire.CHANNELS, *(["harmonics"] if part.bands else [])]
    return [
        "positions",
        "attributes",
        "log_scales",
        "ranges",
        *(["codebook", "indices"] if part.bands else []),
    ]
