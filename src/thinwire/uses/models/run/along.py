"""What of a model's folder goes along with its tensors, and what stays there and is named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from thinwire.types import WRONG_VALUES
from thinwire.uses.models.companions import SHARDS, SMALL, is_code, is_data, is_plain, wants_code

TEMPLATES = "additional_chat_templates"  # a folder that transformers writes
MODULES = "modules.json"  # of sentence-transformers: its parts have folders of their own
STATES = frozenset({"trainer_state.json", "optimizer.json"})  # of a training


def files_along(folder: Path, weights: list[Path], most: int = SMALL) -> tuple[dict[str, bytes], list[str]]:
    """Return the files that belong to a model, by their names in its folder, and those that stay there.

    ``weights``: the files that its tensors are in, which are neither. Hidden files stay and are not named.
    """
    every, left = _all(folder), list[str]()
    data = {name: file for name, file in every.items() if _belongs(name, file) and file not in weights}
    found = {name: file.read_bytes() for name, file in data.items() if _fits(file, most)}
    code = wants_code(found)
    for name, file in every.items():
        if name in found or file in weights or name.endswith(SHARDS):
            continue
        if code and is_code(name) and "/" not in name and is_plain(name) and _fits(file, most):
            found[name] = file.read_bytes()
        else:
            left.append(f"{name} (above {most >> 20} MiB)" if name in data else name)
    return found, left


def _fits(file: Path, most: int) -> bool:
    return file.stat().st_size <= most


def _belongs(name: str, file: Path) -> bool:
    return file.is_file() and is_data(name) and is_plain(name) and file.name not in STATES


def _all(folder: Path) -> dict[str, Path]:
    """Return the files of a model's folder, those of folders that belong to it, and other folders as such."""
    found = dict[str, Path]()
    parts = _parts(folder)
    for file in sorted(folder.iterdir()):
        if file.name.startswith("."):
            continue
        if file.is_dir() and file.name in parts:
            found |= {f"{file.name}/{name}": own for name, own in _below(file)}
        else:
            found[file.name + "/" * file.is_dir()] = file
    return found


def _below(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield file.relative_to(folder).as_posix(), file


def _parts(folder: Path) -> set[str]:
    """Return the folders below that belong to the model."""
    try:
        modules = json.loads((folder / MODULES).read_bytes())
        paths = [m["path"] for m in modules if isinstance(m, Mapping)]
    except (OSError, *WRONG_VALUES):
        paths = []
    return {TEMPLATES, *(path.split("/")[0] for path in paths if isinstance(path, str) and path)}
