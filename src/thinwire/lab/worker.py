"""One rank that ``launch`` started: run, and say on stdout what went wrong."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback


def main() -> int:
    """Run the rank described by the environment; return its exit code."""
    threading.Thread(target=_leave_with_launcher, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    from thinwire.types import ThinwireError

    try:
        from thinwire.lab.config import TrainConfig
        from thinwire.lab.train import run_rank

        run_rank(TrainConfig.from_json(os.environ["THINWIRE_CONFIG"]))
    except KeyboardInterrupt:
        return _say("KeyboardInterrupt", "interrupted", 130)
    except ThinwireError as e:
        return _say(type(e).__name__, str(e), e.exit_code)
    except OSError as e:
        return _say("InputError", f"{e.strerror}: {e.filename}; free space or choose another --out", 2)
    except Exception as e:  # a rank must always say why it left
        traceback.print_exc()
        return _say("ThinwireError", f"rank {os.environ['RANK']}: {type(e).__name__}: {e}", 3)
    return 0


def _say(name: str, text: str, code: int) -> int:
    print(json.dumps({"error": name, "text": text}), flush=True)
    return code


def _leave_with_launcher() -> None:
    """End this rank when its launcher is gone, however that happened: its end of stdin closes."""
    while os.read(0, 1):  # not sys.stdin: its lock would be held when the interpreter ends
        pass
    os._exit(3)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # torch's gloo threads can abort an ordinary interpreter exit
