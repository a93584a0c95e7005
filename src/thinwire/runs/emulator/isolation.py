"""The router's first steps: be the only one, and get the right to make networks. Then become the router.

Run as ``python -m thinwire.runs.emulator.isolation CONTROL``. Only a process with one thread may enter a user
namespace, and importing numpy or torch starts more of them. So this module imports nothing of the kind.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from thinwire.runs.emulator.syscalls import CLONE_NEWNET, CLONE_NEWUSER, INSTEAD, TUN, unshare

ONLY_ONE = "\0thinwire-emulation"  # an abstract address, which the kernel frees when the router ends


class IsolationRefused(Exception):
    """Why there can be no emulation: one sentence, which the owner raises as an ``InputError``."""


def claim() -> socket.socket:
    """Be the only emulation of this machine, while the socket is open. Errors: ``IsolationRefused``."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(ONLY_ONE)
        lock.listen(1 << 10)  # who asks for this process's number stays in the queue
    except OSError as e:
        with lock:
            raise IsolationRefused(
                f"another emulation is running here{_holder(lock)}, and two would spoil each other's times; "
                "wait for its end"
            ) from e
    return lock


def _holder(probe: socket.socket) -> str:
    probe.settimeout(1.0)  # a holder that was stopped takes no more callers
    try:
        probe.connect(ONLY_ONE)
        peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # as of when it began to listen
    except OSError:  # gone meanwhile
        return ""
    return f" (process {int.from_bytes(peer[:4], sys.byteorder)})"


def require_tun() -> None:
    """Raise ``IsolationRefused`` unless this user may open the TUN device."""
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as e:
        raise IsolationRefused(
            f"cannot open {TUN} ({e.strerror}); load the module tun, run as root, {INSTEAD}"
        ) from e


def isolate() -> bool:
    """Get the right to make network namespaces; return whether that took a user namespace.

    In one, this user keeps its name and number. Errors: ``IsolationRefused`` where the system allows neither.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        unshare(CLONE_NEWNET)
        return False
    except OSError:
        pass
    try:
        unshare(CLONE_NEWUSER | CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny", "utf-8")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", "utf-8")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", "utf-8")
    except OSError as e:
        raise IsolationRefused(
            f"this system lets neither this user nor a user namespace make networks ({e.strerror}); "
            f"run as root, {INSTEAD}"
        ) from e
    return True


def main() -> None:
    """Get ready, and be the router until its end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    orders = json.load(sys.stdin)
    try:
        require_tun()
        with claim():
            user = isolate()
            from thinwire.runs.emulator.router import serve

            serve(control, orders, user)
    except IsolationRefused as e:
        control.send(json.dumps({"error": "InputError", "text": str(e)}).encode())


if __name__ == "__main__":
    main()
