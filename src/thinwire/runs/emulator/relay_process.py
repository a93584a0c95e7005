"""The relay as its owner sees it: a process that is started, asked, and told to stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any

from thinwire import types
from thinwire.runs.emulator.orphans import MARK, mark
from thinwire.types import MeasurementError, ThinwireError

START = 60.0  # seconds for the relay to come up on a busy machine
ANSWER = 10.0  # seconds for it to answer, or to end


class RelayProcess:
    """A running relay: ``setup`` is what it has built, ``namespaces`` and ``user`` are descriptors of it.

    Errors: ``InputError`` where the system does not allow what ``orders`` ask for; ``MeasurementError``
    if the relay ends before its time.
    """

    def __init__(self, orders: dict[str, Any]) -> None:
        self._asking = threading.Lock()
        self._lost: ThinwireError | None = None  # why it is not to be asked any more
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile("w+") as stdin:  # a file: a long trace would fill a pipe
            json.dump(orders | {"owner": os.getpid()}, stdin)
            stdin.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "thinwire.runs.emulator.isolation", str(theirs.fileno())],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                env=os.environ | {MARK: mark(os.getpid())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C is for the commands; they may need the network to end well
            )
        ranks = len(orders["profiles"])
        try:
            self.setup, held = self._receive(START, ranks + 1)
        except BaseException:
            self.close()
            raise
        self.namespaces, self.user = held[:ranks], (held[ranks:] or [-1])[0]

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """Return the relay's answer to a request."""
        return self._exchange(what, 0, more)[0]

    def socket(self, rank: int) -> socket.socket:
        """Return a new TCP socket in a rank's namespace."""
        _, fds = self._exchange("socket", 1, {"rank": rank})
        return socket.socket(fileno=fds[0])

    def require_alive(self) -> None:
        """Raise ``MeasurementError`` if the relay has ended, with its last words."""
        if self._process.poll() is not None:
            with self._asking:
                self._receive(ANSWER, 0)

    def close(self) -> None:
        """Let go of the relay, which then ends, and with it the network; wait for that."""
        self._control.close()
        try:
            self._process.wait(ANSWER)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for fd in (*getattr(self, "namespaces", ()), getattr(self, "user", -1)):
            if fd >= 0:
                os.close(fd)
        self.namespaces, self.user = [], -1

    def _exchange(self, what: str, fds: int, more: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        with self._asking:  # ranks ask too, on threads of the launcher's
            if self._lost is not None:  # a late answer would be taken for that to the next request
                raise self._lost
            try:
                self._control.send(json.dumps({"ask": what} | more).encode())
            except OSError:  # it is gone, which the next lines report
                pass
            return self._receive(ANSWER, fds)

    def _receive(self, patience: float, fds: int) -> tuple[dict[str, Any], list[int]]:
        try:
            return self._read(patience, fds)
        except ThinwireError as e:
            self._lost = self._lost or e
            raise self._lost from None

    def _read(self, patience: float, fds: int) -> tuple[dict[str, Any], list[int]]:
        self._control.settimeout(patience)
        try:
            message, held, _, _ = socket.recv_fds(self._control, 1 << 20, fds)
        except TimeoutError as e:
            raise MeasurementError(f"the emulator's relay gave no answer for {patience:g} s") from e
        except ConnectionError:
            message, held = b"", []
        if not message:
            raise MeasurementError(_gone(self._process.wait(ANSWER)))
        said: dict[str, Any] = json.loads(message)
        if "error" in said:
            raise getattr(types, said["error"], ThinwireError)(said["text"])
        return said, held


def _gone(code: int) -> str:
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"the emulator's relay ended {how}, so what was measured is not valid"
