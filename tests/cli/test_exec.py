"""The command that follow runs at each version: killed when it hangs, with what it started."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import torch
from commanded import invoke
from waiting import HOST, LONG, until

from thinwire.runs.terminal.shell_command import ShellCommand
from thinwire.uses.following.push.publisher import Publisher

pytest.importorskip("zstandard")


def gone(pid: int) -> bool:
    """Return whether a process has ended, read or not by whoever started it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    state, told = {"w": torch.zeros(3)}, tmp_path / "pid"
    hanging = f"sleep 600 & echo $! > {shlex.quote(str(told))}; wait"
    with Publisher(state) as p:
        p.publish()
        at = f"{HOST}:{p.port}"
        result = invoke("follow", at, "--once", "--exec", hanging, "--exec-timeout", "2")
        assert result.exit_code == 3, result.output
        assert "--exec took more than 2 s and was killed at version 1" in result.stderr
        if told.exists() and told.read_text().strip():  # a busy machine may not have come so far
            until(lambda: gone(int(told.read_text())))
        wrong = invoke("follow", at, "--once", "--exec-timeout", "0")
        assert wrong.exit_code == 2 and "--exec-timeout is 0; it must be above 0 seconds" in wrong.stderr


def test_what_a_command_leaves_in_the_background_goes_on(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    text = f"sleep 600 > {os.devnull} & echo $! > {shlex.quote(str(told))}"
    assert ShellCommand(text, LONG).run({}) == ""
    pid = int(told.read_text())
    try:
        os.kill(pid, 0)
        assert not gone(pid)
    finally:
        os.kill(pid, 9)
