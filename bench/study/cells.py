"""Finished cells of a bench whose result is one file: kept beside it until the last one is there.

A bench that was stopped goes on after its last finished cell; one that was done measures all anew. Where
cells take long, in ``bench.training.links``, ``plan``, ``quality`` and ``state``, each has a file, for good.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from thinwire.codecs.kernels import native as codec_passes
from thinwire.runs.machine.processor import environment
from thinwire.runs.records.writer import finite, write_json
from thinwire.state import native as state_passes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


class Cells:
    """What is measured of ``result`` so far, under ``settings``.

    Cells of other settings, another machine or other versions are not used.

    Example: ``row = cells.of("4 MB", lambda: measure(4))``, and ``cells.finish(rows)`` at the end.
    """

    def __init__(self, result: Path, settings: dict[str, Any]) -> None:
        self._result = result
        self._file = result.with_name(f".{result.stem}.cells.json")
        self._settings = json.loads(json.dumps({**settings, "made_by": _machine()}))
        known = json.loads(self._file.read_text("utf-8")) if self._file.exists() else {}
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


def keep(file: Path, found: dict[str, Any]) -> None:
    """Write a finished cell that has a file of its own: what was found, and ``made_by``."""
    write_json(file, found | {"made": made_by()})


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


def check_words(wanted: list[str], known: Iterable[Iterable[str]]) -> None:
    """End with a sentence where a wanted word is in no name of a cell: else nothing would be measured."""
    if unknown := set(wanted) - {word for cell in known for word in cell}:
        raise SystemExit(f"no cell has {', '.join(sorted(unknown))} in its name")


class Named(Protocol):
    """A cell, by the words that choose it."""

    @property
    def words(self) -> tuple[str, ...]: ...


Cell = TypeVar("Cell", bound=Named)


def run_cells(
    words: list[str],
    cells: Sequence[Cell],
    file_of: Callable[[Cell], Path],
    measure: Callable[[Cell], dict[str, Any]],
) -> bool:
    """Measure the cells whose names hold all ``words``, each into its file, unless that is there.

    With ``--list`` among the words it prints their names alone; return whether it measured.
    """
    listed, words = "--list" in words, [word for word in words if word != "--list"]
    check_words(words, [cell.words for cell in cells])
    for cell in cells:
        if all(word in cell.words for word in words):
            if not listed and not file_of(cell).exists():
                file_of(cell).parent.mkdir(parents=True, exist_ok=True)
                keep(file_of(cell), measure(cell))
            print(*cell.words, "" if listed else "done", flush=True)
    return not listed
