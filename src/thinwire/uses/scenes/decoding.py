"""Parts and layers to scenes, whichever coder made them."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire import spec
from thinwire.types import PayloadError, require
from thinwire.uses.scenes import coded, mesongs
from thinwire.uses.scenes.coded import Coded
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
