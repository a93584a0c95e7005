"""What a rank may ask of its emulated network: to take the shape off for a while, to begin traces again.

The shape is taken off for traffic outside the experiment, and traces begin with what is measured.

The launcher starts the rank by ``start``, which keeps one end of a socket and serves it; the rank finds the
other in its environment.
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from thinwire.types import LinkError, ThinwireError

if TYPE_CHECKING:
    from thinwire.runs.emulator.session import Emulation

CONTROL = "THINWIRE_EMULATOR"  # environment variable: the number of the rank's end of the socket
LIFT, LOWER, REWIND, DONE = b"+", b"-", b"0", b"k"
DEADLINE = 30.0  # seconds


def start(
    net: Emulation, rank: int, argv: Sequence[str], env: Mapping[str, str], **options: Any
) -> subprocess.Popen[Any]:
    """Start a command in a rank's namespace that may use ``lifted``; ``options`` are ``Popen``'s."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far:
        variables = {**env, CONTROL: str(far.fileno())}
        options["pass_fds"] = [*options.get("pass_fds", ()), far.fileno()]
        process = net.popen(rank, argv, variables, **options)
    threading.Thread(target=_serve, args=(near, net), name=f"lifts of rank {rank}", daemon=True).start()
    return process


def _serve(control: socket.socket, net: Emulation) -> None:
    """Answer one rank's requests until it is gone."""
    wanted = 0
    try:
        with control:
            while asked := control.recv(1):
                if asked == REWIND:
                    net.rewind()
                else:
                    by = 1 if asked == LIFT else -1
                    wanted += by
                    net.lift(by)
                control.send(DONE)
            if wanted:  # it ended in the middle of a lift
                net.lift(-wanted)
    except (OSError, ThinwireError):  # the run is over
        return


@contextmanager
def lifted() -> Iterator[bool]:
    """Send at full speed inside the block, if this rank's network is emulated; all ranks do so together.

    Yields whether it is. TCP's connections remember what they saw meanwhile: make them anew afterwards.
    """
    found = _control()
    if found is None:
        yield False
        return
    with found as control:
        _ask(control, LIFT)
        try:
            yield True
        finally:
            _ask(control, LOWER)


def rewind() -> None:
    """Let the traces of this rank's network begin again, if it is emulated: for all ranks, so one asks."""
    found = _control()
    if found is not None:
        with found as control:
            _ask(control, REWIND)


def _control() -> socket.socket | None:
    """Return the socket to the launcher; None where it was not inherited, though the variable was."""
    number = os.environ.get(CONTROL, "")
    try:
        if not number.isdecimal() or not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
            return None
        found = socket.socket(fileno=os.dup(int(number)))
    except OSError:
        return None
    if (found.family, found.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        return found
    found.close()
    return None


def _ask(control: socket.socket, what: bytes) -> None:
    control.settimeout(DEADLINE)
    try:
        control.send(what)
        answered = control.recv(1) == DONE
    except OSError:
        answered = False
    if not answered:
        raise LinkError(f"the emulated network did not answer within {DEADLINE:g} s; start all ranks again")
