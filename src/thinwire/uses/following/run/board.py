"""The state demo's display: a live table on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

from typing import Any

from thinwire.runs.records.display import Display
from thinwire.runs.records.progress import megabytes
from thinwire.uses.following.run.record import STREAM, FollowerLog, StateRecord
from thinwire.uses.following.run.recorder import StateRecorder

HEAD = ("process", "", "version", "age", "last patch", "ratio", "came in all", "link", "pause")
DASH = "–"


def seconds(x: float | None) -> str:
    """Return a time in words.

    >>> seconds(0.0123), seconds(4.56), seconds(None)
    ('12 ms', '4.6 s', '–')
    """
    return DASH if x is None else f"{x * 1e3:.0f} ms" if x < 1 else f"{x:.1f} s"


def rows(recorder: StateRecorder) -> list[list[str]]:
    """Return the table: the trainer, then its followers."""
    record, last = recorder.record, recorder.published[-1] if recorder.published else None
    share = f"{last.changed / record.numel:.2%} of weights moved" if last and record.numel else DASH
    trainer = ["trainer", _training(recorder), str(last.version if last else 1), DASH, share, DASH,
               f"sent {megabytes(record.bytes[STREAM])}" if last else DASH, DASH,
               seconds(last.publishing_s if last else None)]  # fmt: skip
    return [trainer, *(_row(record, name, log) for name, log in record.followers.items())]


def _training(recorder: StateRecorder) -> str:
    config = recorder.record.config
    if not recorder.published:
        return "first step" if recorder.now else "loading"
    last = recorder.published[-1]
    total = config["steps"] * len(config["rates"])
    return f"step {last.step}/{total} at {last.rate:g}, loss {last.loss:.3f}"


def _row(record: StateRecord, name: str, log: FollowerLog) -> list[str]:
    if log.joined is None:
        return [name, log.role, *[DASH] * 7]
    s, last = log.status, log.arrivals[-1] if log.arrivals else None
    cut = len(log.cut) == 1
    return [
        name,
        log.role,
        str(s.get("held", DASH)),
        seconds(s.get("age")),
        megabytes(last["nbytes"]) if last else DASH,
        f"{record.ratio(last['nbytes']):.0f}×" if last else DASH,
        megabytes(log.wire_bytes),
        "cut" if cut else "up" if s.get("connected") else "down",
        seconds(s.get("pause")),
    ]


class Board(Display):
    """Show a run as it goes on. ``quiet`` shows nothing."""

    def update(self, recorder: StateRecorder) -> None:
        """Show what is new."""
        if self._live is not None:
            self.draw(_table(recorder), None)
        elif not self.quiet and self.due():
            text = "; ".join(" ".join(c for c in (r[0], *_plain(r)) if c) for r in rows(recorder))
            self.draw(None, f"{recorder.now:5.0f} s  {text}")


def _plain(row: list[str]) -> list[str]:
    name, what, version, age, patch, ratio, came, link, _ = row
    if name == "trainer":
        return [what, f"({patch})" if patch != DASH else ""]
    if link == DASH:
        return ["not here yet"]
    return [f"v{version}", f"age {age}", f"{patch} = {ratio}" if patch != DASH else "", came, link]


def _table(recorder: StateRecorder) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(*HEAD, box=None, pad_edge=False)
    for row in rows(recorder):
        table.add_row(*row)
    written = [t for log in recorder.record.followers.values() for t in log.texts]
    if not written:
        return table
    said = " ".join(written[-1]["text"].split())
    return Group(table, Text(f"weights of step {written[-1]['step']} write: {said}", style="italic"))
