"""Emulated networks for tests: skipped where not allowed, in turns where others use one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from launchers import cold, warm

from thinwire.links.profile import profiles
from thinwire.runs.emulator.session import Emulation
from thinwire.runs.emulator.syscalls import INSTEAD
from thinwire.types import InputError

TURN = 60.0  # seconds to wait for another emulation of this machine
BUSY = "another emulation is running here"
# What a machine may lack; any other refusal is a fault.
REFUSALS = (BUSY, INSTEAD, "pip install 'thinwire[", "this kernel has no congestion control 'bbr'")


def lacking(text: str) -> bool:
    """Say whether a sentence refuses emulation for what this machine lacks, or for another emulation."""
    return any(words in text for words in REFUSALS)


@contextmanager
def emulation(*links: str, ranks: int = 2, refused: str = "never", **options: Any) -> Iterator[Emulation]:
    """Open an emulation, or skip the test with the reason, unless it has the word ``refused`` in it."""
    end = time.monotonic() + TURN
    with ExitStack() as stack:
        while True:
            try:
                net = stack.enter_context(Emulation(profiles(links, ranks), **options))
                break
            except InputError as e:
                if refused in str(e) or not lacking(str(e)):
                    raise
                if BUSY not in str(e) or time.monotonic() > end:
                    pytest.skip(str(e))
            time.sleep(0.5)
        yield net


def emulate(*arguments: str, before: Sequence[str] = (), **more: Any) -> subprocess.CompletedProcess[str]:
    """Run ``thinwire emulate`` to its end, or skip the test where that is not possible at all."""
    end = time.monotonic() + TURN
    while True:
        with tempfile.TemporaryDirectory() as place:
            if before:
                command = cold(Path(place), *before, sys.executable, "-m", "thinwire", "emulate", *arguments)
            else:
                command = warm().start(Path(place), "emulate", *arguments, **more)
            code = command.wait()
            run = subprocess.CompletedProcess(arguments, code, command.out, command.err)
        if BUSY not in run.stderr or time.monotonic() > end:
            break
        time.sleep(0.5)
    if BUSY in run.stderr:
        pytest.skip(run.stderr.strip())
    return run
