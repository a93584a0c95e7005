"""Texts to train on, the same each time."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = [
    "river",
    "stone",
    "the",
    "a",
    "of",
    "light",
    "house",
    "and",
    "walks",
    "sings",
    "old",
    "night",
    "bird",
    "over",
    "under",
    "king",
    "hears",
    "tree",
]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 12345\n"  # Git LFS's


def write_text(file: Path, lines: int = 3000) -> Path:
    r = random.Random(0)
    file.write_text(
        "".join(" ".join(r.choice(WORDS) for _ in range(9)).capitalize() + ".\n" for _ in range(lines))
    )
    return file
