"""The list of all engines' recipes, read from a file: the registries need torch, which takes a second.

``python -m thinwire.uses.listing`` writes the file anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thinwire.uses import uses

FILE = Path(__file__).with_name("listing.json")


def listed() -> list[dict[str, Any]]:
    """Return each recipe's engine, name, summary, source and parameters, as plain values.

    >>> listed()[0]["name"]
    'fp32'
    """
    rows: list[dict[str, Any]] = json.loads(FILE.read_text("utf-8"))
    return rows


def text() -> str:
    """Return what the file should hold: the registries' recipes, one a line."""
    lines = []
    for registry in (use.named(home) for use in uses() for home in use.registries):
        for info in registry.entries.values():
            about = {"engine": registry.engine, "name": info.name, "summary": info.summary}
            taken = {
                name: {"default": p.default, "values": p.values, "meaning": p.meaning}
                for name, p in info.parameters.items()
            }
            row = about | {"source": info.source, "parameters": taken}
            lines.append(json.dumps(row, ensure_ascii=False))
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
