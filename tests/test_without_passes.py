"""Contracts hold without the compiled passes too: a quick run of them, in a process that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
QUICK = {
    "codecs": ["test_roundtrip.py", "test_native.py"],
    "state": ["test_format.py", "test_find_changes.py", "test_native.py"],
    "codecs/zstd": ["test_zstd.py"],
    "uses/scenes": ["test_render.py", "test_codes.py"],
    "uses/models": ["test_budgets.py::test_budgets_are_kept_and_used_from_coarse_to_fine"],
}


def test_contracts_hold_without_the_compiled_passes() -> None:
    pytest.importorskip("zstandard")
    files = [str(TESTS / folder / name) for folder, names in QUICK.items() for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "without_passes", "-p", "no:cacheprovider"]
    own = {"PYTHONPATH": str(TESTS / "shared"), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [*command, *files], env=os.environ | own, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
    assert "passed" in found.stdout
