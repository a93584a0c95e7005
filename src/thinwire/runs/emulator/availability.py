"""Whether this machine lets networks be made, which emulated links need."""

from __future__ import annotations

import subprocess
import sys

# Tried, because a system may give a user namespace and then refuse all use of it. What makes one is imported
# late, as in isolation: only a process with one thread may enter a user namespace.
TRIAL = """
import sys
from thinwire.runs.emulator import isolation
try:
    isolation.require_tun()
    isolation.isolate()
    from thinwire.runs.emulator import namespaces
    namespaces.make(rank=0, congestion="cubic", segments=2)
except (isolation.IsolationRefused, ValueError) as e:
    sys.exit(str(e))
except ImportError:
    sys.exit("networks need pyroute2, which is absent; pip install 'thinwire[emulate]'")
"""


def why_not() -> tuple[str, str] | None:
    """Return why no network can be made here, and what would help; None where one can.

    It is tried in a process of its own: the network ends with it.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"could not be tried: {e}", ""
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines() or ["for no reason that is known"]
    finding, _, remedy = said[-1].partition("; ")
    return finding, remedy


def as_emulated() -> tuple[bool, str]:
    """Return whether a demo's link can be emulated here, and in words how it is made."""
    trouble = why_not()
    if trouble is None:
        return True, "emulated"
    return False, f"shaped in the processes, without TCP ({trouble[0]})"
