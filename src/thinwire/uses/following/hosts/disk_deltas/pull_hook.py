"""Let an engine that is told of a version wait until that has come over the line."""

from __future__ import annotations

import time
from pathlib import Path

from thinwire.files.checkpoint import INDEX
from thinwire.types import LinkError
from thinwire.uses.following.hosts.disk_deltas.indexed_deltas import SLIME

PATIENCE = 1200.0  # seconds that a version may take over the line
LOOK = 0.02  # seconds


def await_version(source_dir: str, target_version: int, patience: float = PATIENCE) -> None:
    """Return once ``target_version`` lies whole in the folder that ``thinwire follow --deltas`` writes.

    slime's engines call it before they read, by ``--custom-pull-weights-pre-read-hook`` with this path. The
    signature is that of ``sglang-pull_weights.patch`` in slime's commit 624b824 [quoted: code]. Errors:
    ``LinkError`` after ``patience`` seconds.
    """
    index = Path(source_dir) / SLIME.place(target_version, False) / INDEX
    ends = time.monotonic() + patience
    while not index.is_file():
        if time.monotonic() > ends:
            raise LinkError(
                f"{index.parent} did not come within {patience:g} s; see whether 'thinwire follow --deltas' "
                "runs here and 'thinwire publish --deltas' beside the trainer"
            )
        time.sleep(LOOK)
