"""``thinwire demo state``: a model trained while two processes follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.runs.machine.standard_streams import print_json, tell
from thinwire.runs.records.writer import REPORT, forget
from thinwire.runs.terminal.activity import fetch_needs
from thinwire.runs.terminal.typer_options import with_config
from thinwire.types import ThinwireError
from thinwire.uses.following.run.options import StateConfig

STATE_SHOWN = ("model", "data", "device", "link", "steps", "seed", "emulate", "out", "json", "quiet")


@with_config(StateConfig, without=tuple(n for n in StateConfig.names() if n not in STATE_SHOWN))
def state(given: dict[str, Any]) -> None:
    """Train SmolLM2-135M at 1e-6 and 1e-5 while two processes follow its weights over 10 Mbit/s.

    One follower writes text from the newest weights and is cut off for a while, the other joins late; both
    must end with the trainer's bits. About four minutes on two cores. Ends with a table and OUT/report.html.
    """
    config = StateConfig.from_dict(given)
    from thinwire.runs.records.folder_lock import holding
    from thinwire.runs.report.page import write_report
    from thinwire.uses.following.run import cards
    from thinwire.uses.following.run.state_demo import Board, run

    fetch_needs(config.model, config.data, quiet=config.quiet or config.json)
    out = Path(config.out)
    with holding(out):
        forget(out, REPORT)
        board = Board(config.quiet or config.json)
        try:
            played = run(config, board.update)
        finally:
            board.close()
        report = write_report([played], out / REPORT, cards)
    if config.json:
        print_json(played.record.to_dict())
    else:
        tell(f"{cards.headline([played])}\nreport: {report}")
    if not played.record.identical:
        raise ThinwireError("a follower did not end with the publisher's bits; see the report")
