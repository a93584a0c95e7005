"""One command, run once a rank of an emulated network: its output passed on, its end watched over."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import IO

from thinwire.runs.emulator.session import Emulation
from thinwire.runs.machine.interrupts import stop
from thinwire.runs.ranks.supervise import LATE, RankFailure, Supervisor
from thinwire.types import ThinwireError

Show = Callable[[int, bool, bytes], None]  # rank, whether on stderr, a line
# Behind a line feed, and behind a carriage return that does not belong to one.
_LINE_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")


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
    readers: list[threading.Thread] = []
    with ExitStack() as stack:
        stack.callback(_join, readers)
        ranks = stack.enter_context(Supervisor(net.require_alive))
        try:
            for rank in range(len(net.profiles)):
                p = net.popen(
                    rank,
                    command,
                    env=os.environ | net.environment(rank),
                    stdin=subprocess.DEVNULL,
                    stdout=pipe,
                    stderr=pipe,
                    start_new_session=True,  # or a Ctrl-C at a terminal would reach them twice
                )
                ranks.processes.append(p)
                if show is not None:
                    for is_error, stream in enumerate((p.stdout, p.stderr)):
                        readers.append(_reader(rank, stream, bool(is_error), show, rewrites[is_error]))
            return ranks.watch()
        except KeyboardInterrupt:  # some save something first
            stop(ranks.processes, signal.SIGINT, signal.SIGTERM)
            raise


def _join(readers: list[threading.Thread]) -> None:
    end = time.monotonic() + LATE  # what stays in a namespace after its command keeps a pipe open
    for thread in readers:
        thread.join(max(0.0, end - time.monotonic()))


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
