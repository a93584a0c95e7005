"""What this machine is and can do: for the run record and for ``thinwire doctor``."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import thinwire
from thinwire.files.host_memory import memory_bytes
from thinwire.runs.machine import devices

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pyzmq", "zstandard")
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # malloc.h
NEVER, NONE = -1, 0
CHOSEN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")  # by these a user has said how memory is to be had


def cores() -> int:
    """Return the processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pick_threads(config: Any) -> int:
    """Return the compute threads of one rank: as asked, or this machine's cores shared out."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(config.threads) or max(1, cores() // local)


def cpu_model() -> str:
    """Return the processor's name, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Return the versions of thinwire, Python and the packages a result depends on; ``None`` if absent."""
    import importlib.metadata  # here: it takes a sixth of the time of --help

    found: dict[str, str | None] = {"thinwire": thinwire.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def peak_rss_bytes() -> int:
    """Return the largest resident set of this process so far, in bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_peak(pid: int) -> int:
    """Return the largest resident set of a process so far, bytes; 0 where the system does not tell.

    Unlike ``peak_rss_bytes`` it leaves out what whoever started the process had then.
    """
    try:
        for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def forget_peak() -> None:
    """Let the ``resident_peak`` of this process begin anew, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")


def environment(asked_dtype: str, threads: int, device: torch.device | None = None) -> dict[str, Any]:
    """Return the record's ``environment``: versions, machine, device, the dtype picked, threads of a rank."""
    dtype, reason = devices.pick_dtype(asked_dtype, device)
    return {
        "versions": versions(),
        "machine": {
            "cpu": cpu_model(),
            "cores": cores(),
            "memory_bytes": memory_bytes()[0],
            "platform": f"{platform.system()} {platform.machine()}",
        },
        "devices": [devices.facts(device or devices.choose(devices.CPU))],
        "dtype": dtype,
        "dtype_reason": reason,
        "threads": threads,
    }


def keep_freed() -> bool:
    """Let malloc keep what is freed, and return whether it does.

    Not with another C library than glibc, nor where the environment chooses an allocator or its settings.
    """
    if any(name.startswith(CHOSEN) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(MMAP_MAX, NONE)) and bool(mallopt(TRIM_THRESHOLD, NEVER))


def hand_back() -> bool:
    """Give what was freed to the kernel, and return whether there was any: between parts of a long work."""
    try:
        return bool(ctypes.CDLL("libc.so.6").malloc_trim(0))
    except (OSError, AttributeError):  # another C library
        return False
