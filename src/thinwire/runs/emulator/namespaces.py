"""One network namespace a rank, with a TUN device in it, held by descriptors alone.

Nothing gets a name in the file system: when the router and the processes inside are gone, however they ended,
the kernel removes devices and namespaces. Only the router's process calls this; it has one thread.

Segmentation offload is the trick that makes a router in Python fast enough: TCP cuts segments for an MTU of
1500 bytes as ever, but hands over up to 64 KiB of them in one piece.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.links.shape import MTU
from thinwire.runs.emulator.packets import PREFIX
from thinwire.runs.emulator.syscalls import CLONE_NEWNET, INSTEAD, TUN, setns, unshare
from thinwire.types import InputError

DEVICE = "tun0"
QUEUE = 4000  # packets that the device holds while the router is busy
BUFFER = 1 << 28  # bytes a socket may hold: a long, fast link has tens of megabytes under way
SYSCTLS = {  # written where the system allows it; what counts is what is read back
    "net.ipv4.tcp_wmem": f"4096 16384 {BUFFER}",
    "net.ipv4.tcp_rmem": f"4096 131072 {BUFFER}",
    "net.ipv4.tcp_slow_start_after_idle": "1",  # Linux's default, which costs a run that syncs now and then
    "net.ipv4.tcp_no_metrics_save": "1",  # or the self-check would leave its mark on later connections
    "net.ipv6.conf.all.disable_ipv6": "1",
}
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 1, 2
_SEGMENTS = 44  # of 1448 bytes, in 64 KiB


@dataclass(frozen=True)
class RankNamespace:
    """A rank's namespace and device, both held open by a descriptor, and the settings read back."""

    net: int
    tun: int
    settings: dict[str, str]


def address(rank: int) -> str:
    """Return a rank's IPv4 address.

    >>> address(0)
    '10.77.0.1'
    """
    return ".".join(map(str, (*PREFIX, rank + 1)))


def offload_segments(rate: float) -> int:
    """Return how many segments may cross in one piece: a millisecond's worth, as TCP's own sizing aims at.

    >>> [offload_segments(mbit * 125e3) for mbit in (1, 100, 1000)]
    [2, 8, 44]
    """
    return int(min(max(rate * 1e-3 / MTU, 2), _SEGMENTS))


def make(rank: int, congestion: str, segments: int) -> RankNamespace:
    """Make a namespace and move into it, with a device up, addressed and routed.

    Errors: ``InputError`` for no TUN, no permission, a congestion control that the kernel does not have.
    """
    try:
        unshare(CLONE_NEWNET)
        net = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        settings = {name: _set(name, value) for name, value in SYSCTLS.items()}
        tun = _open_tun()
        _configure(address(rank), congestion, segments)
    except OSError as e:  # AppArmor gives a user namespace and then refuses all use of it
        raise InputError(
            f"this system does not allow a network in a namespace ({e.strerror or e}); run as root, {INSTEAD}"
        ) from e
    return RankNamespace(net, tun, settings)


def dropped(net: int) -> int:
    """Return how many packets a namespace's device had to drop so far, and stay in that namespace."""
    try:
        setns(net, CLONE_NEWNET)
        devices = Path("/proc/thread-self/net/dev").read_text(encoding="ascii")
    except OSError:
        return 0
    fields = next((f for f in map(str.split, devices.splitlines()) if f[:1] == [f"{DEVICE}:"]), None)
    return int(fields[12]) if fields else 0  # after eight of reception: bytes, packets, errors, drops


def _set(name: str, value: str) -> str:
    path = Path("/proc/sys") / name.replace(".", "/")
    try:
        path.write_text(value, "utf-8")
    except OSError:  # read-only in many containers
        pass
    try:
        return " ".join(path.read_text("utf-8").split())
    except OSError:
        return "absent"


def _open_tun() -> int:
    import fcntl  # Linux has it; Windows can import the rest of this module

    tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return tun


def _configure(own: str, congestion: str, segments: int) -> None:
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    with IPRoute() as ip:
        try:
            lo, tun = (ip.link_lookup(ifname=name)[0] for name in ("lo", DEVICE))
            ip.link("set", index=lo, state="up")
            ip.link("set", index=tun, mtu=MTU, txqlen=QUEUE, gso_max_segs=segments, state="up")
            ip.addr("add", index=tun, address=own, prefixlen=32)
        except NetlinkError as e:
            raise OSError(e.code, os.strerror(e.code)) from e
        _route(ip, tun, own, congestion)


def _route(ip: Any, device: int, own: str, congestion: str) -> None:
    """Route all ranks' addresses to the device, and with them the congestion control.

    An attribute of the route reaches every program in the namespace, and works where the kernel refuses to
    let a namespace set net.ipv4.tcp_congestion_control.
    """
    from pyroute2.netlink.exceptions import NetlinkError

    network = ".".join(map(str, (*PREFIX, 0))) + "/24"
    try:
        ip.route("add", dst=network, oif=device, prefsrc=own, metrics={"cc_algo": congestion})
    except NetlinkError as e:
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text("utf-8").split()
        raise InputError(
            f"this kernel has no congestion control {congestion!r}; choose one of {', '.join(sorted(known))}"
        ) from e
