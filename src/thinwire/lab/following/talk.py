"""How the demo's processes talk to the one that started them: a line of JSON each way, on the standard pipes.

A worker whose orders end (its starter is gone) ends at once, whatever it is doing.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.types import LinkError, ThinwireError

ORDER = "THINWIRE_STATE_DEMO"  # environment variable: what a worker is to do, as JSON
_speaking = threading.Lock()
_starter = 1  # the descriptor of the pipe to the starter


def say(kind: str, **words: Any) -> None:
    """Write one line for the starter; ``at`` is when, in seconds since the epoch."""
    line = json.dumps({"kind": kind, "at": time.time()} | words).encode() + b"\n"
    with _speaking:
        while line:
            line = line[os.write(_starter, line) :]


class Orders:
    """What the starter says, word by word, read on a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def next(self, timeout: float) -> str | None:
        """Return the next order, or None after ``timeout`` seconds."""
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None

    def wait_for(self, word: str, timeout: float) -> None:
        """Wait for one order. Errors: ``LinkError`` after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while (found := self.next(max(0.0, end - time.monotonic()))) != word:
            if found is None:
                raise LinkError(f"waited {timeout:g} s for the order {word!r}; start the demo again")

    def _read(self) -> None:
        for line in sys.stdin:
            self._queue.put(line.strip())
        os._exit(3)  # nobody is there to hear the rest


def run_worker(work: Callable[[Mapping[str, Any], Orders], None]) -> None:
    """Do ``work`` with what the environment orders; what goes wrong is said before the process ends."""
    global _starter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the starter's business
    _starter = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not get between the lines
    order = json.loads(os.environ[ORDER])
    try:
        work(order, Orders())
    except ThinwireError as e:
        say("error", text=str(e), code=e.exit_code)
        os._exit(e.exit_code)
    os._exit(0)  # threads of the model's library can hold up an ordinary exit
