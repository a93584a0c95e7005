"""What the memory of messages costs: what was freed is used again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from thinwire.links import Reliable, loopback_pair

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if "link" in sys.argv:
    Reliable(loopback_pair()[0])
for turn in range(6):
    before = faults()
    held = [b"x" * (1 << 20) for _ in range(16)]
    del held
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other limits")
def test_behind_a_link_the_system_clears_no_page_of_messages_twice() -> None:
    def pages(*how: str) -> int:
        command = [sys.executable, "-c", PROGRAM, *how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)

    assert pages("link") < 100 < 1000 < pages()  # of 4096
