"""A layer to a scene, whichever coder made it."""

from __future__ import annotations

from thinwire import spec
from thinwire.assets.splats import mesongs, thinwire
from thinwire.assets.splats.layer import Layer
from thinwire.assets.splats.scene import Splats
from thinwire.types import PayloadError, require


def decode_layer(layer: Layer) -> Splats:
    """Return the scene that a layer stands for. Errors: ``PayloadError``."""
    missing = [name for name in _streams(layer) if name not in layer.streams]
    require(not missing, PayloadError, f"a layer without {', '.join(missing)}: it is damaged")
    if layer.codec == thinwire.NAME:
        return thinwire.decode(layer)
    require(layer.codec == mesongs.NAME, PayloadError, f"a layer by {layer.codec!r:.40}; update thinwire")
    text = str(layer.about.get("spec"))
    coder: mesongs.MesonGS = spec.parse(text, {"MesonGS": mesongs.MesonGS})
    return coder.decode(layer)


def _streams(layer: Layer) -> list[str]:
    if layer.codec == thinwire.NAME:
        return ["positions", "classes", *thinwire.CHANNELS, *(["harmonics"] if layer.bands else [])]
    return [
        "positions",
        "attributes",
        "log_scales",
        "ranges",
        *(["codebook", "indices"] if layer.bands else []),
    ]
