"""A link through a relay: a ``ZmqLink`` on loopback and the tunnel under it."""

from __future__ import annotations

from time import monotonic
from typing import Any, Self

from thinwire.links.address import Route
from thinwire.links.pair.zmq_link import ZmqLink
from thinwire.links.relay.handshake import Request, Role, access_key, is_pass, pair_name
from thinwire.links.relay.tunnel import LOOPBACK, Tunnel
from thinwire.links.security import REMEDY, check_bytes, require_long
from thinwire.links.tcp import congestion
from thinwire.links.tcp.counts import KernelCounts
from thinwire.links.tcp.info import TcpInfo
from thinwire.types import InputError, require


class RelayedLink(ZmqLink):
    """A ``ZmqLink`` and the tunnel under it, closed together."""

    def over(self, tunnel: Tunnel) -> Self:
        """Return this link, which from now on is the tunnel's."""
        self._tunnel = tunnel
        tunnel.lost.add_done_callback(lambda lost: self.fail(lost.result()))
        return self

    def kernel_counts(self) -> KernelCounts:
        """Return the counters of the connections to the relay; ZeroMQ's own only lead to the tunnel."""
        return _TunnelCounts(self._tunnel)

    def close(self, timeout: float = 5.0) -> None:
        end = monotonic() + timeout
        super().close(timeout)
        self._tunnel.close(max(0.5, end - monotonic()))


class _TunnelCounts(KernelCounts):
    """Follow a tunnel's connections, which have another port each time."""

    def __init__(self, tunnel: Tunnel) -> None:
        super().__init__(tunnel.route.port, local=False)
        self._tunnel = tunnel

    def _ours(self, info: TcpInfo) -> bool:
        return super()._ours(info) and info.local[1] in self._tunnel.ports


def check_relay(token: bytes | None) -> bytes:
    """Return the token that a link through a relay needs; ``InputError`` without one."""
    if token is None:
        raise InputError(
            f"links through a relay leave this machine and need a shared token: {REMEDY} on each rank"
        )
    check_bytes(token)
    require(
        not is_pass(token),
        InputError,
        "this is the pass of a relay, not the token it was made of; give each rank the token",
    )
    require_long(token)
    return token


def relayed_link(
    route: Route,
    token: bytes,
    rank: int,
    other: int,
    *,
    instance: bytes,
    connect_timeout: float = 60.0,
    end: float | None = None,
    max_message: int,
    control: str = congestion.AUTO,
) -> RelayedLink:
    """Return ``rank``'s link to ``other`` through a relay; the lower of the two listens.

    ``instance``: 16 random bytes, drawn once by each process; a rank talks to one instance of each other rank
    only, so that neither a second run nor a restarted rank can slip into this one. ``end``: when
    ``connect_timeout`` seconds are over, if they began before. ``control``: TCP's congestion control of the
    way to the relay (``congestion``). Errors: those of ``Tunnel.wait``.
    """
    chosen = congestion.resolve(control)
    low, high = sorted((rank, other))
    name = pair_name(token, route.run, low, high)
    request = Request(Role.LISTEN if rank == low else Role.DIAL, name, instance)
    peer, key = f"rank {other}", access_key(token)
    options: Any = {"token": token, "peer": peer, "via": str(route)}
    options |= {"connect_timeout": connect_timeout, "max_message": max_message}
    options["control"] = congestion.SYSTEM  # to the tunnel
    who = f"{peer} ({route})"
    if rank == high:
        tunnel = Tunnel(route, key, request, who, timeout=connect_timeout, control=chosen, end=end)
        tunnel.wait()
        return RelayedLink.connect(name.hex().encode(), LOOPBACK, tunnel.port, **options).over(tunnel)
    link = RelayedLink.bind(name.hex().encode(), LOOPBACK, **options)
    tunnel = Tunnel(route, key, request, who, link.port, connect_timeout, chosen, end)
    link.over(tunnel)
    try:
        tunnel.wait()
    except BaseException:
        link.close(0.0)
        raise
    return link
