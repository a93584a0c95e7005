"""The cells of a study: measured one by one, each kept once it is finished, so that a study can be stopped.

A study of many cells keeps them for good, in one file with a line for each (``Kept``); ``run_study`` measures
what is missing. A bench that writes one table keeps cells only until that is there (``Cells``): done, it
measures all anew.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

import torch

from thinwire.codecs.kernels import kernel_calls as codec_passes
from thinwire.replacing import replacing
from thinwire.runs.machine.processor import environment
from thinwire.runs.records.writer import finite, read_json, write_json
from thinwire.state import native as state_passes
from thinwire.types import MeasurementError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
# Student's t that leaves out 2.5 % at each end, for so many values.
QUANTILES = {
    2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 16: 2.131,
}  # fmt: skip
NAMED = ("seed", "rate", "round")  # numbers that would not say what they are
Cell = TypeVar("Cell", bound=tuple[Any, ...])


def words_of(cell: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the words that choose a cell: its values as text, without what is empty.

    >>> from collections import namedtuple
    >>> words_of(namedtuple("Cell", "way seed")("ours", 0)), words_of(("coding", 1e-6, ""))
    (('ours', 'seed=0'), ('coding', '1e-06'))
    """
    found = list[str]()
    for name, value in zip(getattr(cell, "_fields", [""] * len(cell)), cell, strict=True):
        for x in value if isinstance(value, tuple) else (value,):
            if x not in ("", None):
                text = f"{x:g}" if isinstance(x, float) else str(x)
                found.append(f"{name}={text}" if name in NAMED else text)
    return tuple(found)


class Kept:
    """The finished cells of a study, in ``bench/results/cells``: by their words, each on a line of its own.

    Several processes may write; each line says when, where and by which code it was made.
    """

    def __init__(self, study: str) -> None:
        self.file = RESULTS / "cells" / f"{study}.json"
        self._read: tuple[int, dict[str, Any]] = (0, {})

    def all(self) -> dict[str, Any]:
        """Return all cells by name, in the order of names."""
        changed = self.file.stat().st_mtime_ns if self.file.exists() else 0
        if changed != self._read[0]:
            self._read = changed, read_json(self.file)
        return self._read[1] if changed else {}

    def get(self, *cell: Any) -> Any:
        """Return a cell, given whole or by its values; None where it is not finished."""
        return self.all().get(" ".join(words_of(cell[0] if isinstance(cell[0], tuple) else cell)))

    def keep(self, cell: tuple[Any, ...], found: dict[str, Any]) -> None:
        """Write a finished cell."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        name = " ".join(words_of(cell))
        with _locked(self.file.parent):
            known = self.all() | {name: finite(found | {"made": made_by()})}
            write = json.JSONEncoder(separators=(",", ":")).encode
            lines = ",\n".join(f"{write(k)}: {write(v)}" for k, v in sorted(known.items()))
            with replacing(self.file) as temporary:
                temporary.write_text(f"{{\n{lines}\n}}\n", "utf-8")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def run_study(
    study: str,
    words: Sequence[str],
    cells: Callable[[], Iterable[Cell]],
    measure: Callable[[Cell], dict[str, Any]],
    summary: Callable[[], dict[str, Any]],
    attempts: int = 1,
    result: str = "",
    stale: Callable[[Cell, dict[str, Any]], bool] = lambda cell, found: False,
) -> None:
    """Measure the missing cells whose words hold all of ``words``, and write the study's summary.

    With ``--list`` among the words it prints their names alone. ``result`` names the summary's file, if not
    the study does; a ``stale`` cell is measured anew. What could not be measured, after so many
    ``attempts``, is named at the end: ``SystemExit``.
    """
    kept, wanted, left = Kept(study), set(words) - {"--list"}, []
    if unknown := wanted - {word for cell in cells() for word in words_of(cell)}:
        raise SystemExit(f"no cell has {', '.join(sorted(unknown))} in its name")
    for cell in (c for c in cells() if wanted <= set(words_of(c))):
        name = " ".join(words_of(cell))
        found = kept.get(cell)
        if "--list" not in words and (found is None or stale(cell, found)):
            try:
                kept.keep(cell, retried(name, partial(measure, cell), attempts))
            except MeasurementError as e:
                left.append(f"{name}: {e}")
        print(name, flush=True)
    if "--list" not in words:
        write_json(RESULTS / f"{result or study}.json", {"missing": missing(study, cells())} | summary())
    if left:
        raise SystemExit(f"not measured: {'; '.join(left)}")


def retried(name: str, measure: Callable[[], dict[str, Any]], attempts: int) -> dict[str, Any]:
    """Return what is measured, tried again where it does not count. Errors: the last attempt's."""
    for attempt in range(1, attempts + 1):
        print(name, "..." if attempt == 1 else f"attempt {attempt} ...", file=sys.stderr, flush=True)
        try:
            return measure()
        except MeasurementError as e:
            if attempt == attempts:
                raise
            print(e, file=sys.stderr, flush=True)
    raise ValueError("no attempt was asked for")


def missing(study: str, cells: Iterable[tuple[Any, ...]]) -> list[str]:
    """Return the names of the cells that are not finished."""
    known = Kept(study).all()
    return [name for cell in cells if (name := " ".join(words_of(cell))) not in known]


class Cells:
    """What is measured of ``result`` so far, under ``settings``.

    Cells of other settings, another machine or other versions are not used.

    Example: ``row = cells.of("4 MB", lambda: measure(4))``, and ``cells.finish(rows)`` at the end.
    """

    def __init__(self, result: Path, settings: dict[str, Any]) -> None:
        self._result = result
        self._file = result.with_name(f".{result.stem}.cells.json")
        self._settings = json.loads(json.dumps({**settings, "made_by": _machine()}))
        known = read_json(self._file) if self._file.exists() else {}
        self._found: dict[str, Any] = known["cells"] if known.get("settings") == self._settings else {}

    def of(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return a cell as it was found before the bench was stopped, else measured now."""
        if name not in self._found:
            self._found[name] = finite(measure())
            write_json(self._file, {"settings": self._settings, "cells": self._found})
        return self._found[name]

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result, and forget its cells."""
        write_json(self._result, result)
        self._file.unlink(missing_ok=True)


def made_by() -> dict[str, Any]:
    """Return when, by which code and on which machine a cell is finished."""
    now, commit = datetime.now(UTC).isoformat(timespec="seconds"), _commit()
    return {"finished": now, "commit": COMMIT if commit == COMMIT else f"{COMMIT}..{commit}", **_machine()}


def makers(found: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Return how many cells each processor and commit made, and how many do not say.

    >>> makers([{"made": {"commit": "a1", "machine": {"cpu": "C"}}}, {}])
    {'C, commit a1': 1, 'not recorded': 1}
    """
    return dict(Counter(map(_maker, found)))


def _maker(cell: dict[str, Any]) -> str:
    made = cell.get("made") or cell.get("record", {}).get("environment")
    return (
        f"{made['machine']['cpu']}, commit {made.get('commit', 'not recorded')}" if made else "not recorded"
    )


def _commit() -> str:
    """Return the commit of this checkout, "+" behind it where code differs; "unknown" outside of one."""
    try:
        git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10)
        head = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
        changed = git(["git", "status", "--porcelain", "--", "src", "bench", ":!bench/results"]).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + "+" * bool(changed)


COMMIT = _commit()  # when this process began: the code that it runs


def _machine() -> dict[str, Any]:
    compiled = {"codecs": codec_passes.there(), "state": state_passes.there()}
    return environment("bf16", torch.get_num_threads()) | {"compiled": compiled}


def interval(values: Sequence[float]) -> list[float]:
    """Return the mean, and how far the 95 % interval by Student's t goes to either side; of one, the mean.

    >>> [round(x, 3) for x in interval([1.0, 2.0, 3.0])]
    [2.0, 2.484]
    """
    many = len(values)
    if many < 2:
        return [fmean(values)]
    return [fmean(values), QUANTILES[many] * stdev(values) / math.sqrt(many)]
