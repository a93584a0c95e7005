"""Ask a publisher or a shelf what it has, without following it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor

from thinwire.engines.sync import protocol
from thinwire.engines.sync.claim import read_manifest
from thinwire.engines.sync.fetching import Fetching
from thinwire.engines.sync.folder import Folder, open_folder
from thinwire.engines.sync.manifest import LAYOUT, Manifest
from thinwire.engines.sync.mirror import Mirror
from thinwire.engines.sync.proof import Proof
from thinwire.engines.sync.protocol import DOWN, MAGIC, NOTHING, PROTOCOL, Ask, Hello, LayoutIs
from thinwire.links.events import Kind
from thinwire.links.spoke import Spoke
from thinwire.state.history import History
from thinwire.state.layout import MAX_NBYTES, Layout
from thinwire.state.patch import Version
from thinwire.types import InputError, LinkError, PayloadError, ThinwireError, require


@dataclass(frozen=True)
class Offer:
    """What a publisher has: the state's name and layout, and its newest version's number (0: none yet)."""

    name: str
    newest: int
    layout: Layout


def ask(
    host: str, port: int, token: bytes | None = None, timeout: float = 60.0, max_nbytes: int = MAX_NBYTES
) -> Offer:
    """Return what the publisher or relay at ``host``:``port`` has.

    Errors: ``LinkError`` naming it after ``timeout`` seconds, ``AuthError``, ``PayloadError``; ``InputError``
    for another protocol.
    """
    spoke, ends = Spoke.connect(host, port, token=token), monotonic() + timeout
    try:
        while (left := ends - monotonic()) > 0:
            event = spoke.recv(left)
            if event is not None and event.kind is Kind.JOINED:
                spoke.send(Hello(MAGIC, PROTOCOL, 1, NOTHING, NOTHING, 0, 0, 0, 0, 0, 0, 0).pack())
            elif event is not None and event.kind is Kind.DATA:
                found = _offer(protocol.unpack(event.data, DOWN), spoke.peer, max_nbytes)
                if found is not None:
                    return found
    finally:
        spoke.close(0.0)
    raise LinkError(f"{spoke.peer} did not answer within {timeout:g} s; see whether a publisher is there")


def _offer(message: protocol.Message, peer: str, max_nbytes: int) -> Offer | None:
    if isinstance(message, Ask) and message.protocol != PROTOCOL:
        raise InputError(
            f"{peer} speaks protocol {message.protocol}, this end {PROTOCOL}: install the same thinwire there"
        )
    if not isinstance(message, LayoutIs):
        return None
    layout = Layout.from_json(message.json, max_nbytes)
    require(layout.digest == message.layout.hex(), PayloadError, "a layout whose digest is another")
    return Offer(message.name.rstrip(b"\0").decode(errors="replace"), message.newest, layout)


def look(folder: Folder, token: bytes | None = None, max_nbytes: int = MAX_NBYTES) -> tuple[Manifest, Layout]:
    """Return the manifest and the layout of a shelf.

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
    """Return the newest tensors that a shelf holds, and which version they are.

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
    """Let a history without versions begin with the newest of a shelf, as that calls it.

    A publisher that starts again goes on from there: its readers need a patch. See ``recall``.
    """
    found = None if history.newest.number else recall(url, token, history.layout, name, options)
    if found is not None:
        tensors, version = found
        history.outnumber(version.number - 1)
        history.publish(tensors, version.meta, version.published)
