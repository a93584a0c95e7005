"""Files of machines and links, for tests of plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

from thinwire.uses.training.pipeline.choosing.pipeline_plan import Way


def everywhere(names: Sequence[str], way: Way) -> dict[tuple[str, str], Way]:
    return dict.fromkeys(permutations(names, 2), way)


DESK, ATTIC = '[[machine]]\nname = "desk"\n', '[[machine]]\nname = "attic"\nspeed = 0.5\n'


LINK = '[[link]]\nfrom = "desk"\nto = "attic"\nlink = "20mbit,25ms,jitter=50ms"\n'


def written(folder: Path, text: str) -> Path:
    file = folder / "machines.toml"
    file.write_text(text)
    return file
