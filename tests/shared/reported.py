"""Records to report of."""

from __future__ import annotations

import io

from rich.console import Console

from thinwire.runs.records.finished_runs import Run
from thinwire.runs.report.page import report_html
from thinwire.uses.kinds import show_of
from thinwire.uses.training.run.summary import summary_table

THREE = (("fp32", (32.0, 32.0), 3.5), ("step-delta", (8.0, 8.0), 3.51), ("thinwire", (3.0, 2.5), 3.502))


def printed(runs: list[Run]) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary_table(runs))
    return console.export_text()


def page_of(runs: list[Run]) -> str:
    return report_html(runs, show_of(runs))
