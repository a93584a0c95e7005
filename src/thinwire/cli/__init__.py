"""The command line, one file a command. It needs the extra ``cli``; without it one sentence says so."""

from __future__ import annotations

import sys
from collections.abc import Sequence

NEEDED = ("typer", "rich")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
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
    app(args=None if arguments is None else list(arguments), prog_name="thinwire")
