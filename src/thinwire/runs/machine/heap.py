"""The process's heap: what is freed stays there for the next step.

By default glibc hands large blocks back to the kernel as they are freed, and each step asks for the same ones
again, page by page and cleared: a seventh of a step of SmolLM2 [measured, see docs/log.md].
"""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # malloc.h
NEVER, NONE = -1, 0
CHOSEN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")  # by these a user has said how memory is to be had


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
