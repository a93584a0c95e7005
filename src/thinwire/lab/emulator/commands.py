"""One command, run once a rank of an emulated network: its output passed on, its end watched over."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from thinwire.lab.emulator.session import Emulation, stop
from thinwire.types import ThinwireError

POLL = 0.05  # seconds
SIGNALLED = 128  # and the signal's number: the exit code that shells give a killed process
Show = Callable[[int, bool, bytes], None]  # rank, whether on stderr, a line


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed first, by its return code: below zero, the signal that ended it."""

    rank: int
    returned: int

    @property
    def exit_code(self) -> int:
        """What the whole program should end with."""
        return self.returned if self.returned > 0 else SIGNALLED - self.returned

    def __str__(self) -> str:
        how = f"failed with exit code {self.returned}"
        if self.returned < 0:
            how = f"was ended by {signal.Signals(-self.returned).name}"
        return f"rank {self.rank} {how}; the others were stopped"


def run_ranks(net: Emulation, command: Sequence[str], show: Show | None = None) -> RankFailure | None:
    """Run ``command`` once a rank until all have ended, or one has failed; return the failure.

    ``show`` gets their output line by line, from several threads; without it, they write where this process
    does. An interrupt is passed on. Errors: what ``Emulation`` raises.
    """
    pipe = None if show is None else subprocess.PIPE
    ranks: list[subprocess.Popen[Any]] = []
    readers: list[threading.Thread] = []
    try:
        for rank in range(len(net.profiles)):
            variables = os.environ | net.environment(rank)
            p = net.popen(
                rank,
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,  # or a Ctrl-C at a terminal would reach them twice
            )
            ranks.append(p)
            if show is not None:
                readers += [_reader(rank, p.stdout, False, show), _reader(rank, p.stderr, True, show)]
        failure = _watch(net, ranks)
    except KeyboardInterrupt:
        for p in ranks:
            if p.poll() is None:
                p.send_signal(signal.SIGINT)
        raise
    finally:
        stop(ranks)
        for thread in readers:  # what stays in a namespace after its command would keep a pipe open
            thread.join(POLL * 20)
    return failure


def _watch(net: Emulation, ranks: list[subprocess.Popen[Any]]) -> RankFailure | None:
    while True:
        codes = [p.poll() for p in ranks]
        # One that was killed is the cause of what the others say that ended with it.
        failed = sorted((code > 0, rank, code) for rank, code in enumerate(codes) if code)
        if failed:
            return RankFailure(failed[0][1], failed[0][2])
        if None not in codes:
            return None
        net.require_alive()
        time.sleep(POLL)


def _reader(rank: int, stream: IO[bytes] | None, is_error: bool, show: Show) -> threading.Thread:
    if stream is None:
        raise ThinwireError(f"rank {rank} has no output to read")

    def read() -> None:
        with stream:
            for line in stream:
                show(rank, is_error, line)

    thread = threading.Thread(target=read, name=f"output of rank {rank}", daemon=True)
    thread.start()
    return thread
