"""What a command needs and this machine lacks is fetched before the command begins."""

from __future__ import annotations

from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.terminal.doing import Doing


def fetch_needs(*names: str | None, quiet: bool = False) -> None:
    """Fetch the data and models of these names that are known and absent, once, with a bar on a terminal.

    Names that are unknown here, a user's files say, are left to who reads them. Errors: those of the fetch;
    ``KeyboardInterrupt`` once nothing half-fetched is left, after a Ctrl-C, SIGTERM or SIGHUP.
    """
    from thinwire.runs.models.fetch import fetch_missing

    with stopped_by_signals(), Doing(quiet, lines=True) as doing:
        fetch_missing((name for name in names if name), doing.tell)
