"""Tests of kernels in Triton's interpreter, in a process of its own: once asked for, it is there for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def passes_in_the_interpreter(file: str) -> None:
    """Run the tests of a file there."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", file]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
    assert "passed" in found.stdout and Path(file).name in found.stdout
