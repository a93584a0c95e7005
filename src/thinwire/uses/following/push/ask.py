"""Ask a publisher what it has, without following it."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

from thinwire.links.hub.spoke import Spoke
from thinwire.links.hub.station import EventKind
from thinwire.state.layout import MAX_NBYTES, Layout
from thinwire.types import InputError, LinkError, PayloadError, require
from thinwire.uses.following.push import protocol
from thinwire.uses.following.push.protocol import DOWN, MAGIC, NOTHING, PROTOCOL, Ask, Hello, LayoutIs


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
            if event is not None and event.kind is EventKind.JOINED:
                spoke.send(Hello(MAGIC, PROTOCOL, 1, NOTHING, NOTHING, 0, 0, 0, 0, 0, 0, 0).pack())
            elif event is not None and event.kind is EventKind.DATA:
                found = _offer(protocol.unpack(event.data, DOWN), spoke.peer, max_nbytes)
                if found is not None:
                    return found
    finally:
        spoke.close(0.0)
    who = f"{spoke.peer}{spoke.tried}"
    raise LinkError(f"{who} did not answer within {timeout:g} s; see whether a publisher is there")


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
