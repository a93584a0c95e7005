"""Links: bytes and time between two ranks. They know nothing of tensors or codecs.

Each name is imported at first use: who needs an address or a token alone loads no sockets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.links.link import Link, LinkEstimate, loopback_pair
    from thinwire.links.mailbox import Mailbox
    from thinwire.links.mesh import Peer, connect_mesh
    from thinwire.links.metered import Metered, Snapshot, Traffic
    from thinwire.links.pair.reliable import Reliable
    from thinwire.links.pair.zmq_link import ZmqLink
    from thinwire.links.security import read_token
    from thinwire.links.shape import LinkShape
    from thinwire.links.shaped import Shaped

_HOMES = {
    "link": ("Link", "LinkEstimate", "loopback_pair"),
    "mailbox": ("Mailbox",),
    "mesh": ("Peer", "connect_mesh"),
    "metered": ("Metered", "Snapshot", "Traffic"),
    "pair.reliable": ("Reliable",),
    "pair.zmq_link": ("ZmqLink",),
    "security": ("read_token",),
    "shape": ("LinkShape",),
    "shaped": ("Shaped",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Link",
    "LinkEstimate",
    "LinkShape",
    "Mailbox",
    "Metered",
    "Peer",
    "Reliable",
    "Shaped",
    "Snapshot",
    "Traffic",
    "ZmqLink",
    "connect_mesh",
    "loopback_pair",
    "read_token",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
