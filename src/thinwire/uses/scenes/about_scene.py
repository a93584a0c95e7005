"""What is in a scene file that others write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.files.base import Folder
from thinwire.files.local_folder import PlainFolder
from thinwire.types import InputError
from thinwire.uses.scenes.files.scene_file import FORMS, form_of, read_scene_file
from thinwire.uses.scenes.scene import Splats, cleaned

KIND = "scene"
MANIFEST = "meta.json"  # of a folder of SOG


def knows(name: str, _: bytes) -> bool:
    """Return whether a file is called as a scene is."""
    return name.lower().endswith(tuple(FORMS))


def describe(place: Path | Folder, check: bool) -> dict[str, Any]:
    """Return what a scene file or a folder of SOG holds; all of it is read in any case.

    Errors: ``InputError`` for a damaged one.
    """
    if not isinstance(place, Path | PlainFolder):
        raise InputError(f"{place.where} is a scene of SOG, which is read from this machine only; fetch it")
    path = place if isinstance(place, Path) else place.path
    splats, nbytes = read_scene_file(path)
    found: dict[str, Any] = {"kind": f"scene, {form_of(path)}", "where": str(path), "nbytes": nbytes}
    found |= {"splats": splats.count, "bands": splats.bands}
    found |= {"checked": True} if check else {}
    try:
        kept, odd = cleaned(splats)
    except InputError:  # nothing in it can be shown, which is what it holds
        return found | {"odd": {"dropped": splats.count}}
    strange = {kind: count for kind, count in odd._asdict().items() if count}
    return found | bounds(kept) | ({"odd": strange} if strange else {})


def bounds(splats: Splats) -> dict[str, Any]:
    """Return the corners of the box that the centres of splats are in.

    >>> bounds(Splats.of([[0, 0, 0], [1, 2, 3]]))
    {'bounds': {'low': [0.0, 0.0, 0.0], 'high': [1.0, 2.0, 3.0]}}
    """
    low, high = splats.positions.min(0), splats.positions.max(0)
    return {"bounds": {"low": [round(float(x), 4) for x in low], "high": [round(float(x), 4) for x in high]}}
