"""Scenes of 3D Gaussians in Python: read and write their files, pack them into few bytes, show them.

>>> from thinwire import scenes
>>> splats = scenes.read("scene.ply")  # doctest: +SKIP
>>> data = scenes.pack(splats, nbytes=2_000_000)  # doctest: +SKIP
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.uses.scenes.scene import Splats

LAYERS = 4

__all__ = ["Splats", "pack", "page", "read", "unpack", "write"]


def __getattr__(name: str) -> Any:
    if name != "Splats":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from thinwire.uses.scenes.scene import Splats

    return Splats


def read(path: str | os.PathLike[str]) -> Splats:
    """Read a scene: .ply, .compressed.ply, .spz, .splat, .sog, or one that ``pack`` made.

    Splats that no program can show (not finite, invisible) are left out.
    Errors: ``InputError``, ``PayloadError`` for a damaged file, ``MissingExtra``, ``OSError``.
    """
    from thinwire.uses.scenes.files.packed_scene import is_scene
    from thinwire.uses.scenes.files.scene_file import read_scene_file
    from thinwire.uses.scenes.scene import cleaned

    file = Path(path)
    with file.open("rb") as opened:
        packed = is_scene(opened.read(256))
    return unpack(file.read_bytes()) if packed else cleaned(read_scene_file(file)[0])[0]


def write(path: str | os.PathLike[str], splats: Splats) -> None:
    """Write a scene whole or not at all, in the form that the file's name says: .ply, .spz, ...

    Errors: ``InputError`` for another name, ``OSError``.
    """
    from thinwire.replacing import replacing
    from thinwire.uses.scenes.files.scene_file import scene_bytes

    data = scene_bytes(splats, Path(path))
    with replacing(Path(path)) as part:
        part.write_bytes(data)


def pack(
    splats: Splats,
    *,
    nbytes: int | None = None,
    quality: float | None = None,
    layers: int = LAYERS,
    refine: bool = False,
) -> bytes:
    """Return a scene in at most ``nbytes`` bytes, or in few that have ``quality`` dB of PSNR.

    The coarse of ``layers`` come first: what the first bytes hold can be shown while the rest is on its way.
    ``refine``: fewer splats, which fit the scene's own pictures again: minutes, for fewer bytes.
    Errors: ``InputError`` where not just one target is given, or none is that small or fine.

    >>> import numpy as np
    >>> from thinwire import scenes
    >>> splats = scenes.Splats.of(np.random.default_rng(0).normal(size=(300, 3)))
    >>> len(scenes.pack(splats, nbytes=6_000)) <= 6_000
    True
    """
    from thinwire.types import InputError, require
    from thinwire.uses.scenes.files.packed_scene import write_scene
    from thinwire.uses.scenes.importance_coder import Analysis, Thinwire
    from thinwire.uses.scenes.run.scene_packing import check_refined, layers_to, refined_layers
    from thinwire.uses.scenes.view.views import Views

    require((nbytes is None) != (quality is None), InputError, "give nbytes or quality, one of them")
    check_refined(Thinwire(layers), "thinwire", refine)
    scene = Analysis.through(Views.of(splats), splats)
    if refine:
        return write_scene(refined_layers(scene, splats, nbytes, quality, layers))
    return write_scene(layers_to(scene, splats, nbytes, quality, layers))


def unpack(data: bytes, layers: int | None = None) -> Splats:
    """Return the scene that ``pack`` packed, or what its first ``layers`` show.

    Errors: ``PayloadError`` for other or damaged bytes.
    """
    from thinwire.uses.scenes.files.packed_scene import read_scene
    from thinwire.uses.scenes.layers import shown_after

    return shown_after(read_scene(data)[:layers])


def page(data: bytes, title: str, credit: str = "") -> str:
    """Return one page of HTML that shows a packed scene in any browser with WebGL2, and needs nothing else.

    Errors: ``PayloadError`` for other or damaged bytes.
    """
    from thinwire.uses.scenes.files.packed_scene import read_scene
    from thinwire.uses.scenes.page.web_page import page_of

    return page_of(read_scene(data), title, credit)
