"""What is in a packed scene: its layers and streams, and what each prefix of it shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.files.base import Folder
from thinwire.types import PayloadError
from thinwire.uses.scenes.about_scene import bounds
from thinwire.uses.scenes.delivery import MANIFEST, fetch, read_manifest
from thinwire.uses.scenes.files.packed_scene import Outline, is_scene, read_layers, read_outline
from thinwire.uses.scenes.layers import shown_after
from thinwire.uses.scenes.part import Layer

KIND = "packed scene"
__all__ = ["KIND", "MANIFEST", "describe", "knows"]


def knows(_: str, head: bytes) -> bool:
    """Return whether a file begins as a packed scene."""
    return is_scene(head)


def describe(place: Path | Folder, check: bool) -> dict[str, Any]:
    """Return what a packed scene, the beginning of one, or a folder of its layers holds.

    ``check`` decodes every layer of it. Errors: ``PayloadError`` for a damaged one, ``LinkError``.
    """
    if not isinstance(place, Path):
        pieces = read_manifest(place)
        own: dict[str, Any] = {"kind": "packed scene, a file a layer", "where": place.where}
        own["nbytes"] = sum(piece.nbytes for piece in pieces)
        return own | _about(b"".join(fetch(place, pieces)), place.where, check)
    data = place.read_bytes()
    return {"kind": "packed scene", "where": str(place), "nbytes": len(data)} | _about(data, place, check)


def _about(data: bytes, where: object, check: bool) -> dict[str, Any]:
    try:
        outline, (layers, _) = read_outline(data), read_layers(data)
        for i in range(1, len(layers)) if check else ():
            shown_after(layers[:i])
        shown = shown_after(layers) if layers else None
    except PayloadError as e:
        raise PayloadError(f"{where}: {e}") from e
    found: dict[str, Any] = {"version": outline.version, "recipe": _recipe(outline, layers)}
    found |= {"splats": shown.count if shown is not None else 0, "bands": outline.bands}
    found["layers_here"] = f"{len(layers)} of {len(outline.layers)}"
    found |= bounds(shown) if shown is not None else {}
    found |= {"checked": True} if check else {}
    return found | {"header_nbytes": outline.begin, "layers": _layers(outline), "streams": _streams(outline)}


def _recipe(outline: Outline, layers: Sequence[Layer]) -> str:
    """Return what coded the scene, with its parameters where the file has them."""
    specs = [str(part.about.get("spec", part.codec)) for layer in layers for part in layer.parts.values()]
    return ", ".join(dict.fromkeys(specs or [codec for layer in outline.layers for codec in layer.codecs]))


def _layers(outline: Outline) -> list[dict[str, Any]]:
    """Return a row a layer: its bytes, and what the file up to its end shows."""
    return [
        {"layer": i, "nbytes": sum(x.streams.values()), "prefix": x.end, "splats": x.splats}
        for i, x in enumerate(outline.layers, 1)
    ]


def _streams(outline: Outline) -> list[dict[str, Any]]:
    """Return a row a stream: its bytes in all, and in each layer, stand-ins included."""
    found = dict[str, dict[str, Any]]()
    for i, layer in enumerate(outline.layers, 1):
        for name, nbytes in layer.streams.items():
            stream = name.partition("/")[2]
            blank = {"stream": stream, "nbytes": 0} | {
                f"layer {k + 1}": 0 for k in range(len(outline.layers))
            }
            row = found.setdefault(stream, blank)
            row["nbytes"] += nbytes
            row[f"layer {i}"] += nbytes
    return list(found.values())
