"""The list of all engines' recipes, read from a file: the registries need torch, which takes a second.

``python -m thinwire.recipes.listing`` writes the file anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    from thinwire.recipes.diffusion import DIFFUSION
    from thinwire.recipes.experts import EXPERTS
    from thinwire.recipes.federated import FEDERATED
    from thinwire.recipes.pipeline import PIPELINE
    from thinwire.recipes.replicas import REPLICAS
    from thinwire.recipes.scenes import SCENES
    from thinwire.recipes.state import STATE

    lines = []
    for registry in (PIPELINE, REPLICAS, STATE, DIFFUSION, EXPERTS, FEDERATED, SCENES):
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
