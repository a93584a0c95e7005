"""The command line, one file a command. It needs the extra ``cli``; without it one sentence says so."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from thinwire import __version__

NEEDED = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    if [*(sys.argv[1:] if arguments is None else arguments)] == ["--version"]:  # without a library to load
        sys.stdout.write(f"thinwire {__version__}\n")
        sys.exit(0)
    try:
        from thinwire.cli.app import app
    except ModuleNotFoundError as e:
        if (e.name or "").split(".")[0] not in NEEDED:
            raise
        sys.stderr.write(
            f"thinwire: the command line needs {e.name}, which is absent; pip install 'thinwire[cli]'\n"
        )
        sys.exit(2)
    except KeyboardInterrupt:  # while torch is being imported
        sys.exit(130)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="thinwire")
    except SystemExit as e:
        if "thinwire.uses.training.run.training_rank" in sys.modules:
            _leave_rank(e.code)
        raise


def _leave_rank(code: object) -> None:
    """End a rank at once: the interpreter's own end takes seconds, and gloo's threads can abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
