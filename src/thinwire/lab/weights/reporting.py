"""What packing a model leaves in a folder when asked: record and report."""

from __future__ import annotations

from pathlib import Path

from thinwire.lab.records.runs import Run
from thinwire.lab.records.writer import RUN, write_json
from thinwire.lab.report.page import write_report
from thinwire.lab.weights import cards
from thinwire.lab.weights.record import ModelRecord

REPORT = "report.html"


def leave_report(folder: Path, record: ModelRecord) -> Path:
    """Write ``run.json`` and ``report.html`` of a packed model to a folder; return the last."""
    (folder / REPORT).unlink(missing_ok=True)  # of an earlier run, which must not pass for this one's
    write_json(folder / RUN, record.to_dict())
    return write_report([Run(record.recipe.name, record, folder=folder)], folder / REPORT, cards)
