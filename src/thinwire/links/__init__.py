"""Links: bytes and time between two ranks. They know nothing of tensors or codecs."""

from thinwire.links.base import Link, LinkEstimate
from thinwire.links.loopback import loopback_pair
from thinwire.links.mailbox import Mailbox
from thinwire.links.mesh import Peer, connect_mesh
from thinwire.links.metered import Metered, Snapshot, Traffic
from thinwire.links.pair.reliable import Reliable
from thinwire.links.pair.zmq_link import ZmqLink
from thinwire.links.security import read_token
from thinwire.links.shape import LinkShape
from thinwire.links.shaped import Shaped

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
