"""Processes inside an emulation's namespaces: found by the namespace, or by the mark of their emulation.

All that an emulation starts carries a mark in its environment: process and start time of the owner, the
process that opened the emulation. Where that owner is gone, what carries its mark is an orphan.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from thinwire.links.tcp.congestion import EMULATED

MARK = EMULATED  # environment variable
PATIENCE = 5.0  # seconds for the kernel to end what was killed


@dataclass(frozen=True)
class Orphan:
    """A process whose emulation is gone."""

    pid: int
    command: str


def mark(pid: int) -> str:
    """Return the mark of the emulation that process ``pid`` owns; no later process has the same."""
    return f"{pid}.{_started(pid)}"


def _started(pid: int) -> str:
    """Return when a process started, in ticks since boot; empty: it does not exist, or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _processes() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and int(p.name) != os.getpid()]


def inside(namespaces: Iterable[int]) -> list[int]:
    """Return the processes in any of the network namespaces, given by inode, but for this one."""
    wanted = set(namespaces)
    found = []
    for pid in _processes():
        try:
            if Path(f"/proc/{pid}/ns/net").stat().st_ino in wanted:
                found.append(pid)
        except OSError:  # gone, a zombie, or somebody else's
            continue
    return found


def sweep(namespaces: Iterable[int]) -> None:
    """Kill all processes in the network namespaces, those they start meanwhile included."""
    wanted, end = set(namespaces), time.monotonic() + PATIENCE
    while (pids := inside(wanted)) and time.monotonic() < end:
        _kill(pids)
        time.sleep(0.01)


def _numbers(pid: int | str) -> int | None:
    """Return the namespace of a process's number, and of those that it knows; None where that is hidden."""
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return None


def orphans() -> list[Orphan]:
    """Return the processes that carry the mark of an emulation whose owner is gone.

    Those of a container are left out: their mark's number is one of the container's, and its owner may live.
    """
    found, own_numbers = [], _numbers("self")
    for pid in _processes():
        try:
            if _numbers(pid) != own_numbers:
                continue
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = (
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            )
        except OSError:
            continue
        own = next((v for v in variables if v.startswith(f"{MARK}=".encode())), b"").decode(
            "utf-8", "replace"
        )
        owner, _, started = own.partition("=")[2].partition(".")
        if owner.isdigit() and started and _started(int(owner)) != started:
            found.append(Orphan(pid, command.strip()))
    return found


def clean() -> list[Orphan]:
    """Kill what emulations that ended badly have left; return what that was."""
    found = orphans()
    _kill(o.pid for o in found)
    end = time.monotonic() + PATIENCE
    while any(_started(o.pid) for o in found) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
