"""Let a rank take the shape off its emulated network for a while: for traffic outside the experiment.

The launcher keeps one end of a socket and serves it; the rank finds the other in its environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from thinwire.types import LinkError

CONTROL = "THINWIRE_EMULATOR"  # environment variable: the number of the rank's end of the socket
LIFT, LOWER, DONE = b"+", b"-", b"k"
DEADLINE = 30.0  # seconds


class Liftable(Protocol):
    """An emulation (``session.Emulation``)."""

    def lift(self, by: int) -> None:
        """Count ``by`` more ranks that want the shape off; it is back on at none."""
        ...


def serve(control: socket.socket, net: Liftable) -> None:
    """Answer one rank's requests until it is gone."""
    try:
        while asked := control.recv(1):
            net.lift(1 if asked == LIFT else -1)
            control.send(DONE)
    except OSError:  # the run is over
        return


@contextmanager
def lifted() -> Iterator[None]:
    """Send at full speed inside the block, if this rank's network is emulated; all ranks do so together."""
    number = os.environ.get(CONTROL)
    if number is None:
        yield
        return
    with socket.socket(fileno=os.dup(int(number))) as control:
        control.settimeout(DEADLINE)
        _ask(control, LIFT)
        try:
            yield
        finally:
            _ask(control, LOWER)


def _ask(control: socket.socket, what: bytes) -> None:
    try:
        control.send(what)
        answered = control.recv(1) == DONE
    except OSError:
        answered = False
    if not answered:
        raise LinkError(f"the emulated network did not answer within {DEADLINE:g} s; start all ranks again")
