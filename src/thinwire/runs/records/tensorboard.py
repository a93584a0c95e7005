"""TensorBoard event files beside the run record: the same numbers, for people who watch runs there."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ABSENT = "no TensorBoard event files: tensorboard is not installed (pip install 'thinwire[tensorboard]')"
FOLDER = "events"


def remove_events(out: Path) -> None:
    """Remove the event files of an earlier run: TensorBoard draws all in a folder as one."""
    for file in (out / FOLDER).glob("events.out.tfevents.*"):
        file.unlink()


class EventLog:
    """Write steps as TensorBoard scalars into ``OUT/events``; without tensorboard do nothing, and say so.

    ``note`` is the sentence for the run's notes, or ``None``.
    """

    def __init__(self, out: str | Path, enabled: bool = True) -> None:
        self.note: str | None = None
        self._folder = Path(out) / FOLDER
        self._writer: Any = self._open() if enabled else None

    def _open(self, first: int | None = None) -> Any:
        try:
            with warnings.catch_warnings():
                # The deprecations of protobuf and numpy are not the user's to fix.
                warnings.simplefilter("ignore")
                from torch.utils.tensorboard import SummaryWriter

                return SummaryWriter(str(self._folder), purge_step=first)
        except ImportError:
            self.note = ABSENT
            return None

    def resumed(self, step: int) -> None:
        """Go on after ``step``: what an earlier part of the run wrote of later steps no longer counts."""
        if self._writer is not None:
            self._writer.close()
            self._writer = self._open(first=step + 1)

    def write(self, values: Mapping[str, float | None], step: int) -> None:
        """Write numbers of a step by name; those that do not exist are left out."""
        if self._writer is None:
            return
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the files. Safe to call twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
