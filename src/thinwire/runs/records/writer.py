"""The run record: ``run.json`` and ``metrics.jsonl``, written so that they survive any interruption."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TextIO, TypeVar

from thinwire.replacing import replacing
from thinwire.runs.machine.interrupts import held_back
from thinwire.runs.records.run_record import RunRecord, UnitMetrics, build, finite, upgraded_unit
from thinwire.types import InputError

Record = TypeVar("Record", bound=RunRecord)
Metrics = TypeVar("Metrics", bound=UnitMetrics)
RUN = "run.json"
METRICS = "metrics.jsonl"
COMPARE = "compare.json"
REPORT = "report.html"


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as f:
        json.dump(finite(value), f, indent=1, allow_nan=False)
        f.write("\n")


def forget(folder: str | Path, *files: str) -> None:
    """Remove files of an earlier run, which must not pass for those of the one that begins."""
    for name in files:
        (Path(folder) / name).unlink(missing_ok=True)


class RunWriter:
    """Keep ``OUT/run.json`` and ``OUT/metrics.jsonl`` up to date while a run goes on.

    The first ``run.json`` is written at once with status ``running``; ``add`` appends one flushed line
    and counts it; ``close`` writes the final record. A new run empties ``metrics.jsonl`` at once, one whose
    configuration says ``resume`` at its first line, so that a checkpoint which does not load costs no
    numbers. ``done`` above 0 goes on from a checkpoint made after that many units: their lines stay, later
    ones (written after the checkpoint, before the interruption) are dropped.
    """

    def __init__(self, out: str | Path, record: RunRecord, done: int = 0) -> None:
        self.out = Path(out)
        self.record = record
        self.out.mkdir(parents=True, exist_ok=True)
        self._lines: TextIO | None = None
        self._closed = False
        before = read_metrics(self.out, record.METRICS) if done and (self.out / METRICS).exists() else []
        self.kept = [m for m in before if m.number <= done]
        record.recount(self.kept)
        # A run that is to be resumed may yet be refused, which must not cost the record that is there.
        self._held = bool(record.config.get("resume")) and not done
        if not record.config.get("resume"):
            self._open()
        self.write()

    def _open(self) -> TextIO:
        if self._lines is None:
            with replacing(self.out / METRICS) as temporary:  # who is killed here leaves the lines that were
                temporary.write_text("".join(map(_line, self.kept)), encoding="utf-8")
            self._lines = (self.out / METRICS).open("a", encoding="utf-8")
        return self._lines

    def add(self, metrics: UnitMetrics) -> None:
        """Append one unit's line, readable at once, and count it."""
        if self._closed:
            raise ValueError("the run record is closed")
        lines = self._open()
        with held_back():  # or a Ctrl-C would leave a count without its line
            self.record.count(metrics)
            lines.write(_line(metrics))
            lines.flush()

    def note(self, text: str) -> None:
        """Add a warning to the record, once."""
        if text not in self.record.notes:
            self.record.notes.append(text)

    def write(self) -> None:
        """Write ``run.json`` as the record stands."""
        if not self._held:
            write_json(self.out / RUN, self.record.to_dict())

    def close(self, status: str) -> None:
        """Write the final record; ``status`` is done, interrupted, failed or invalid. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        self.record.status = status
        self.write()


def _line(metrics: UnitMetrics) -> str:
    values = {k: v for k, v in dataclasses.asdict(metrics).items() if v is not None}
    return json.dumps(finite(values), allow_nan=False) + "\n"


def load_run(path: str | Path, kind: type[Record]) -> Record:
    """Read ``run.json``, given the file or its folder, as a record of ``kind``.

    Any record reads as a ``RunRecord``. Errors: ``InputError`` where it is missing, broken or of another
    kind.
    """
    file = run_file(path)
    return kind.from_dict(read_json(file), str(file))


def run_file(path: str | Path) -> Path:
    """Return where a run's record is, given that file or its folder."""
    file = Path(path)
    return file / RUN if file.is_dir() or file.suffix != ".json" else file


def read_json(file: Path) -> Any:
    """Read a JSON file; ``InputError`` where it is missing or broken."""
    try:
        return json.loads(file.read_text("utf-8"))
    except OSError as e:
        raise InputError(f"no run record at {file} ({e.strerror}); give the folder of a run") from e
    except ValueError as e:
        raise InputError(f"{file} is not valid JSON ({e}); run it again or leave it out") from e


def read_metrics(folder: str | Path, kind: type[Metrics]) -> list[Metrics]:
    """Read ``metrics.jsonl`` of a run; a last line cut short by a crash is dropped.

    Errors: ``InputError`` for any other line that is not of ``kind``.
    """
    file = Path(folder) / METRICS
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError as e:
        raise InputError(f"no metrics at {file} ({e.strerror}); give the folder of a run") from e
    except ValueError as e:
        raise InputError(f"{file} is not UTF-8 text; run it again or leave it out") from e
    units = []
    for number, text in enumerate(lines, 1):
        try:
            values = json.loads(text)
        except ValueError as e:
            if number == len(lines):
                break
            raise InputError(f"line {number} of {file} is not JSON; run it again or leave it out") from e
        units.append(build(kind, upgraded_unit(values), f"line {number} of {file}"))
    return units
