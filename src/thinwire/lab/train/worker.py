"""One rank that ``launch`` started: run, and say on stdout what went wrong."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback

from thinwire.lab.machine.files import file_trouble
from thinwire.lab.machine.interrupts import let_in, stopped_by_signals


def main() -> int:
    """Run the rank described by the environment; return its exit code."""
    report = os.dup(1)  # for the one line of JSON; what libraries print must not get in its way
    os.dup2(2, 1)
    name, text, code = _outcome()
    if code:
        os.write(report, json.dumps({"error": name, "text": text}).encode() + b"\n")
    return code


def _outcome() -> tuple[str, str, int]:
    """Run, and return the error's class, its sentence and the exit code."""
    try:
        threading.Thread(target=_leave_with_launcher, daemon=True).start()
        with stopped_by_signals():
            let_in()  # what came since the launcher began to start this process
            return _run()
    except KeyboardInterrupt:
        return "KeyboardInterrupt", "interrupted", 130


def _run() -> tuple[str, str, int]:
    from thinwire.types import ThinwireError

    try:
        from thinwire.lab.train.config import TrainConfig
        from thinwire.lab.train.run import run_rank

        run_rank(TrainConfig.from_json(os.environ["THINWIRE_CONFIG"]))
    except ThinwireError as e:
        return type(e).__name__, str(e), e.exit_code
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


def _leave_with_launcher() -> None:
    """End this rank when its launcher is gone, however that happened: its end of stdin closes."""
    while os.read(0, 1):  # not sys.stdin: its lock would be held when the interpreter ends
        pass
    os._exit(3)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # torch's gloo threads can abort an ordinary interpreter exit
