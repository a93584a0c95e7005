"""Who may write to a store: one publisher at a time, known by a random name and seen to live by its lease."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

from thinwire.files.base import Folder
from thinwire.replacing import PART
from thinwire.types import AuthError, InputError, PayloadError
from thinwire.uses.following.pull.manifest import (
    KEYFRAMES,
    LAYOUT,
    MAX_MANIFEST,
    PATCHES,
    STATE,
    WRITTEN,
    Manifest,
    Proof,
    unpack,
)

LOOKS = 6  # within the lease of a publisher that may be gone
MOMENT = 0.5  # seconds between these where there is no manifest just now
LONGEST = 86400.0  # seconds: a lease that nobody waits for
HIGHEST = 1 << 48  # no name of a file moves the numbers of versions above this
_TOP = "|".join(re.escape(name) for name in (STATE, LAYOUT))
# What a file is called until it is whole: a plain folder's name begins with a dot, a store's does not.
_PART = re.compile(
    rf"(({PATCHES}|{KEYFRAMES})/\.?[0-9-]+-[0-9a-f]{{8}}\.safetensors|\.?({_TOP}))"
    rf"\.[0-9a-f]{{8}}{re.escape(PART)}"
)
Wait = Callable[[float], None]


def read_manifest(folder: Folder, proof: Proof) -> Manifest:
    """Return the manifest. Errors: those of ``Folder.read`` and ``manifest.unpack``."""
    return unpack(folder.read(STATE, MAX_MANIFEST), proof, f"{folder.where}/{STATE}")


def claim(
    folder: Folder, proof: Proof, blank: Manifest, sleep: Wait = time.sleep, tell: Wait | None = None
) -> Manifest:
    """Return the manifest to go on from: ``blank``, or with the versions of a publisher that is gone.

    One that did not say goodbye is gone once it gave no sign for its lease while this one looked: their
    clocks may differ by any amount, so they are good enough to keep this one out at once, and for no more.
    ``tell`` hears before how many seconds that takes.

    Errors: ``InputError`` where another publisher is alive there, the state has another name or layout, or
    the manifest is damaged; ``AuthError`` where it has another token; ``OSError`` where nothing can be read.
    """
    first = _looked_for(folder, proof, blank, sleep)
    if first is None:
        return blank
    found = first
    for look in range(LOOKS + 1):
        if found.instance == blank.instance or found.lease <= 0:
            break
        left = found.lease - (blank.written - found.written)
        lately, signs = 0 < left <= found.lease, _sign(found) != _sign(first)
        if lately or signs or found.lease > LONGEST:
            raise _alive(folder, found, left if lately else found.lease)
        if not look and tell is not None:
            tell(found.lease)
        if look < LOOKS:
            sleep(found.lease / LOOKS)
            again = _looked_for(folder, proof, blank, sleep)
            if again is None:
                return blank
            found = again
    return replace(blank, versions=found.versions, files=found.files, meta=found.meta)


def _looked_for(folder: Folder, proof: Proof, blank: Manifest, sleep: Wait) -> Manifest | None:
    """Return what ``_found`` does, looking again while there are files of a publisher's but no manifest.

    Some servers move onto no file: each time the manifest is written, there is none for a moment.
    """
    for _ in range(LOOKS):
        found = _found(folder, proof, blank)
        if found is not None or not _in_use(folder):
            return found
        sleep(MOMENT)
    return _found(folder, proof, blank)


def _found(folder: Folder, proof: Proof, blank: Manifest) -> Manifest | None:
    """Return the manifest that is there, if it is of this state; None where there is none."""
    try:
        found = read_manifest(folder, proof)
    except FileNotFoundError:
        return None
    except PayloadError as e:
        raise InputError(f"{e}; choose another folder, or delete {STATE} there to begin anew") from e
    if found.name != blank.name:
        raise InputError(
            f"{folder.where} holds the state {found.name!r}, not {blank.name!r}; choose another folder"
        )
    if found.digest != blank.digest:
        raise InputError(
            f"{folder.where} holds a state {found.name!r} of other names, shapes or dtypes; "
            "choose another folder"
        )
    return found


def _in_use(folder: Folder) -> bool:
    """Return whether there are files as a publisher writes them, its manifest's next or last one included."""
    aside = any(name.startswith(f"{STATE}.") and name.endswith(PART) for name in folder.sizes(""))
    return aside or bool(files_in(folder))


def _sign(found: Manifest) -> tuple[str, float]:
    return found.instance, found.written


def _alive(folder: Folder, found: Manifest, wait: float) -> InputError:
    return InputError(
        f"another publisher writes the state {found.name!r} to {folder.where}; stop it, choose another "
        f"folder, or, if it has died, wait {wait:.0f} s or delete {STATE} there"
    )


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


def files_in(folder: Folder) -> dict[str, int | None]:
    """Return the patches and keyframes in a folder, and their bytes where these are known."""
    return folder.sizes(PATCHES) | folder.sizes(KEYFRAMES)


def highest(folder: Folder) -> int:
    """Return the highest version that a file there is called after, 0 where there is none.

    Where the manifest was lost or deleted, readers may hold that one, and take none that is not above it.
    """
    found = (WRITTEN.fullmatch(name) for name in files_in(folder))
    numbers = (int(match["version"]) for match in found if match)
    return max((n for n in numbers if n < HIGHEST), default=0)


def left_behind(folder: Folder) -> list[str]:
    """Return the files, whole or not, that publishers of a state write: no others are theirs to delete."""
    names = [*files_in(folder), *folder.sizes("")]
    return [name for name in names if WRITTEN.fullmatch(name) or _PART.fullmatch(name)]
