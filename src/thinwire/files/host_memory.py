"""The memory of this machine, which what is read has to fit: how much there is, and how much is free."""

from __future__ import annotations

import os
from pathlib import Path


def memory_bytes() -> tuple[int | None, int | None]:
    """Return the machine's memory and what of it is free now, in bytes; ``None`` where unknown."""
    found: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text("utf-8").splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    if "MemTotal" not in found and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["MemTotal"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return found.get("MemTotal"), found.get("MemAvailable")
