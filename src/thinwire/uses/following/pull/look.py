"""Ask a store what it has, without following it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.files.base import Folder
from thinwire.files.local_folder import open_folder
from thinwire.state.history import History
from thinwire.state.layout import MAX_NBYTES, Layout
from thinwire.state.patches.patch import Version
from thinwire.types import PayloadError, ThinwireError, require
from thinwire.uses.following.mirror import Mirror
from thinwire.uses.following.pull.claim import read_manifest
from thinwire.uses.following.pull.fetching import Fetching
from thinwire.uses.following.pull.manifest import LAYOUT, Manifest
from thinwire.uses.following.pull.proof import Proof


def look(folder: Folder, token: bytes | None = None, max_nbytes: int = MAX_NBYTES) -> tuple[Manifest, Layout]:
    """Return the manifest and the layout of a store.

    Errors: ``OSError`` where it cannot be read, ``AuthError``, ``PayloadError`` where it is damaged.
    """
    proof = Proof(token)
    manifest = read_manifest(folder, proof)
    data = folder.read(manifest.layout.name, manifest.layout.nbytes)
    whole = proof.fits(LAYOUT, data, manifest.layout.check)
    require(whole, PayloadError, f"{LAYOUT} at {folder.where} is damaged")
    return manifest, Layout.from_json(data, max_nbytes)


def recall(
    url: str | Path,
    token: bytes | None,
    layout: Layout,
    name: str = "state",
    options: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Tensor], Version] | None:
    """Return the newest tensors that a store holds, and which version they are.

    None where it has none of the state ``name`` with this layout, which is seen before they are fetched, and
    where nobody can publish: at a web server. ``options`` go to fsspec.
    """
    if str(url).startswith(("http://", "https://")):
        return None
    folder, proof, mirror = open_folder(url, **(options or {})), Proof(token), Mirror()
    try:
        if read_manifest(folder, proof).digest == layout.digest:
            mirror.agree(layout, name)
            Fetching(folder, proof, mirror, name=name).look()
    except (OSError, ThinwireError):  # whoever writes there next says what is wrong, or writes a keyframe
        pass
    replica = mirror.replica
    if replica is None or not replica.held.hash:
        return None
    replica.swap()
    return replica.tensors(), replica.held


def resume(
    history: History,
    url: str | Path,
    token: bytes | None = None,
    name: str = "state",
    options: Mapping[str, Any] | None = None,
) -> None:
    """Let a history without versions begin with the newest of a store, as that calls it.

    A publisher that starts again goes on from there: its readers need a patch. See ``recall``.
    """
    found = None if history.newest.number else recall(url, token, history.layout, name, options)
    if found is not None:
        tensors, version = found
        history.outnumber(version.number - 1)
        history.publish(tensors, version.meta, version.published)
