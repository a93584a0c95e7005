"""The process of one rank: run a program by name, with the configuration in the environment.

Started as ``python -m thinwire.runs.ranks.rank_main MODULE:FUNCTION MODULE:CLASS``, the class being that of
the configuration. It writes lines of JSON on stdout: what went wrong, and events where the program has some.
It reads orders on stdin, a line each, and ends when that closes: whoever started it is gone.
"""

from __future__ import annotations

import json
import os
import pkgutil
import queue
import sys
import threading
import time
import traceback
from typing import Any

from thinwire.runs.machine.files import file_trouble
from thinwire.runs.machine.interrupts import let_in, stopped_by_signals

CONFIG = "THINWIRE_CONFIG"  # environment variable: the configuration as JSON
_starter = 1  # the descriptor of the pipe to who started this process
_speaking = threading.Lock()
_orders: queue.Queue[str] = queue.Queue()


def say(kind: str, **words: Any) -> None:
    """Write one line for the starter; ``at`` is when, in seconds since the epoch."""
    line = json.dumps({"kind": kind, "at": time.time()} | words).encode() + b"\n"
    with _speaking:
        while line:
            line = line[os.write(_starter, line) :]


def next_order(seconds: float) -> list[str]:
    """Return the words of the next order; none if it has not come after ``seconds``."""
    try:
        return _orders.get(timeout=seconds).split()
    except queue.Empty:
        return []


def await_order(word: str, seconds: float) -> list[str]:
    """Wait for an order that begins with ``word``; return its other words. Errors: ``LinkError``."""
    from thinwire.types import LinkError

    end = time.monotonic() + seconds
    while (order := next_order(max(0.0, end - time.monotonic())))[:1] != [word]:
        if not order:
            raise LinkError(f"waited {seconds:g} s for the order {word!r}; start again")
    return order[1:]


def main(program: str, config: str) -> int:
    """Run the rank described by the environment; return its exit code."""
    global _starter
    _starter = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not get between the lines
    name, text, code = _outcome(program, config)
    if code:
        say("error", error=name, text=text)
    return code


def _outcome(program: str, config: str) -> tuple[str, str, int]:
    """Run, and return the error's class, its sentence and the exit code."""
    try:
        threading.Thread(target=_listen, name="orders", daemon=True).start()
        with stopped_by_signals():
            let_in()  # what came since the launcher began to start this process
            return _run(program, config)
    except KeyboardInterrupt:
        return "KeyboardInterrupt", "interrupted", 130


def _run(program: str, config: str) -> tuple[str, str, int]:
    from thinwire import types
    from thinwire.runs.machine.devices import told
    from thinwire.types import ThinwireError

    try:
        with told():
            pkgutil.resolve_name(program)(pkgutil.resolve_name(config).from_json(os.environ[CONFIG]))
    except ThinwireError as e:
        kind = next(c for c in type(e).__mro__ if hasattr(types, c.__name__))  # that the starter knows too
        return kind.__name__, str(e), e.exit_code
    except Exception as e:  # a rank must always say why it left
        sentence = file_trouble(e) if isinstance(e, OSError) else None
        if sentence is not None:
            return "InputError", sentence, 2
        if os.environ.get("THINWIRE_DEBUG") == "1":
            traceback.print_exc()
        why = " ".join(f"{type(e).__name__}: {e}".split())
        return (
            "ThinwireError",
            f"rank {os.environ['RANK']} failed ({why}); THINWIRE_DEBUG=1 shows where",
            3,
        )
    return "", "", 0


def _listen() -> None:
    rest = b""
    while piece := os.read(0, 1 << 12):  # not sys.stdin: its lock would be held when the interpreter ends
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            _orders.put(line.decode())
    os._exit(3)


if __name__ == "__main__":
    from thinwire.runs.ranks import rank_main  # by the name under which programs import it

    code = rank_main.main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # torch's gloo threads can abort an ordinary interpreter exit
