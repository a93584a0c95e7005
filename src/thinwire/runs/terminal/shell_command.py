"""A shell command that is run now and then, and must not hold up for ever whoever runs it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

SECONDS = 600.0  # that a command may take, unless told otherwise


@dataclass(frozen=True)
class ShellCommand:
    """A shell command that may take ``seconds``: then it is killed, with the processes that it started.

    >>> ShellCommand("exit $CODE").run({"CODE": "3"})
    'ended with code 3'
    """

    text: str
    seconds: float = SECONDS

    def run(self, known: Mapping[str, str]) -> str:
        """Run it with ``known`` in its environment; return what went wrong, nothing where all went well."""
        # a group of its own, so that it can be killed whole; a Ctrl-C at the terminal ends it below
        process = subprocess.Popen(
            self.text, shell=True, env=os.environ | dict(known), start_new_session=True
        )
        try:
            code = process.wait(self.seconds)
        except subprocess.TimeoutExpired:
            return f"took more than {self.seconds:g} s and was killed"
        finally:
            _kill(process)
        return f"ended with code {code}" if code else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command that has not ended; what one that has ended left in the background goes on."""
    if process.poll() is None:
        with suppress(OSError):  # it ends just now
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
