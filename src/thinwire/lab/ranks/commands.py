"""One command, run once a rank of an emulated network: its output passed on, its end watched over."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from thinwire.lab.emulator.session import GRACE, Emulation, stop
from thinwire.types import ThinwireError

POLL = 0.05  # seconds
LATE = 1.0  # seconds for what ranks that have ended wrote to be shown
SIGNALLED = 128  # and the signal's number: the exit code that shells give a killed process
Show = Callable[[int, bool, bytes], None]  # rank, whether on stderr, a line
# Behind a line feed, and behind a carriage return that does not belong to one.
_LINE_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")


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


def run_ranks(
    net: Emulation,
    command: Sequence[str],
    show: Show | None = None,
    rewrites: tuple[bool, bool] = (False, False),
) -> RankFailure | None:
    """Run ``command`` once a rank until all have ended, or one has failed; return the failure.

    ``show`` gets their output line by line, from several threads; without it, they write where this process
    does. ``rewrites``: whether a carriage return ends a line too, on stdout and on stderr. An interrupt is
    passed on, and waited for; a second one kills the ranks. Errors: what ``Emulation`` raises.
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
                for is_error, stream in enumerate((p.stdout, p.stderr)):
                    readers.append(_reader(rank, stream, bool(is_error), show, rewrites[is_error]))
        failure = _watch(net, ranks)
    except KeyboardInterrupt:
        _interrupt(ranks)
        raise
    finally:
        stop(ranks)
        end = time.monotonic() + LATE  # what stays in a namespace after its command keeps a pipe open
        for thread in readers:
            thread.join(max(0.0, end - time.monotonic()))
    return failure


def _interrupt(ranks: list[subprocess.Popen[Any]]) -> None:
    """Pass an interrupt on, and wait for ranks that save something first; a second one kills them."""
    try:
        for p in ranks:
            p.send_signal(signal.SIGINT)  # which spares those that have ended
        end = time.monotonic() + GRACE
        while None in [p.poll() for p in ranks] and time.monotonic() < end:
            time.sleep(POLL)
    except KeyboardInterrupt:
        for p in ranks:
            p.kill()
        raise


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


def _reader(
    rank: int, stream: IO[bytes] | None, is_error: bool, show: Show, rewrites: bool
) -> threading.Thread:
    if stream is None:
        raise ThinwireError(f"rank {rank} has no output to read")

    def read() -> None:
        with stream:
            for line in _lines(stream) if rewrites else stream:
                show(rank, is_error, line)

    thread = threading.Thread(target=read, name=f"output of rank {rank}", daemon=True)
    thread.start()
    return thread


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield lines as they come, also those that end in a carriage return, to be written over."""
    rest = b""
    while piece := os.read(stream.fileno(), 1 << 16):
        *lines, rest = _LINE_ENDS.split(rest + piece)
        yield from lines
    if rest:
        yield rest
