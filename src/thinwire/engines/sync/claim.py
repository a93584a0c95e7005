"""Who may write to a shelf: one publisher at a time, known by a random name and seen to live by its lease."""

from __future__ import annotations

from dataclasses import replace

from thinwire.engines.sync.folder import Folder
from thinwire.engines.sync.manifest import MAX_MANIFEST, STATE, Manifest, unpack
from thinwire.engines.sync.proof import Proof
from thinwire.types import AuthError, InputError, PayloadError


def read_manifest(folder: Folder, proof: Proof) -> Manifest:
    """Return the manifest. Errors: those of ``Folder.read`` and ``manifest.unpack``."""
    return unpack(folder.read(STATE, MAX_MANIFEST), proof, f"{folder.where}/{STATE}")


def claim(folder: Folder, proof: Proof, blank: Manifest) -> Manifest:
    """Return the manifest to go on from: ``blank``, or with the versions of a publisher that is gone.

    Errors: ``InputError`` where another publisher is alive there, the state has another name or layout, or
    the manifest is damaged; ``AuthError`` where it has another token; ``OSError`` where nothing can be read.
    """
    try:
        found = read_manifest(folder, proof)
    except FileNotFoundError:
        return blank
    except PayloadError as e:
        raise InputError(f"{e}; choose another folder, or delete {STATE} there to begin anew") from e
    if found.name != blank.name:
        raise InputError(
            f"{folder.where} holds the state {found.name!r}, not {blank.name!r}; choose another folder"
        )
    left = found.lease - (blank.written - found.written)
    if found.instance != blank.instance and found.lease > 0 and left > 0:
        raise InputError(
            f"another publisher writes the state {found.name!r} to {folder.where}; stop it, choose another "
            f"folder, or, if it has died, wait {left:.0f} s or delete {STATE} there"
        )
    if found.digest != blank.digest:
        raise InputError(
            f"{folder.where} holds a state {found.name!r} of other names, shapes or dtypes; "
            "choose another folder"
        )
    return replace(blank, versions=found.versions, files=found.files)


def check_still_ours(folder: Folder, proof: Proof, instance: str) -> None:
    """Raise ``InputError`` where another publisher has replaced the manifest; a lost one is ours."""
    try:
        found = read_manifest(folder, proof)
        mine = found.instance == instance
    except AuthError:
        mine = False
    except (FileNotFoundError, PayloadError):
        mine = True
    if not mine:
        raise InputError(
            f"another publisher has taken over {folder.where}, so this one has stopped; "
            "give each a folder of its own"
        )
