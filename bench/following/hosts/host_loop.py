"""Step, publish, apply, generate over a slow line, for ``sync_hosts``: by thinwire, and by others' bytes.

A trainer replays the recorded steps of SmolLM2-135M, each of which lasts ``PACE``; a worker on the other side
of the line generates a batch with the model itself, before the next step. Nothing else differs between two
ways but how weights travel. With ``max_age`` 0 each batch waits for the newest weights, with 1 they travel
while the worker generates.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.following.hosts.loop_ranks import POOL, PORT
from bench.following.links import CONTROLS, Cell
from thinwire.types import MeasurementError

LINES = {"20mbit": "20mbit,40ms", "100mbit": "100mbit,5ms"}
PACE = 1.0  # seconds a step
STEPS, WARM = 10, 2
BUSY = 3.0  # load before a loop, above which other work takes the cores
PROMPTS, LENGTH, TOKENS, ROWS = 8, 16, 16, 49_000  # a batch; tokens of a prompt, of a sample, to draw from
SEED = 0


def loop(kind: str, folder: Path, recorded: int, line: str, way: str, max_age: int) -> dict[str, Any]:
    """Return a cell: what each step took, the ages, and the network. Errors: ``MeasurementError``."""
    drawn = np.random.default_rng(SEED).integers(0, ROWS, (PROMPTS, LENGTH))
    orders = {"kind": kind, "folder": str(folder), "recorded": recorded, "way": way, "max_age": max_age,
              "steps": STEPS, "warm": WARM, "pace": PACE, "tokens": TOKENS, "prompts": drawn.tolist(),
              "port": PORT, "pool": POOL}  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        found = Cell(LINES[line], Path(place), orders, CONTROLS[0], "bench.following.hosts.loop_ranks").run()
    if found["publish"]["words"] != found["follow"]["words"]:
        raise MeasurementError(f"{way}: the worker ended with other weights than the trainer")
    return {"line": LINES[line], "way": way, "max_age": max_age, "pace": PACE, **found}


def told(found: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a cell: tokens/s, the share of time waiting for weights, and ages."""
    made, ages, network = found["publish"], found["publish"]["ages"], found["network"]
    seconds = made["seconds"]
    return {
        "tokens_s": sum(r["tokens"] for r in made["rows"]) / seconds,
        "step_s": seconds / len(made["rows"]),
        "waiting": sum(a["waited"] for a in ages) / seconds,
        "behind": statistics.fmean(a["behind"] for a in ages),
        "age": statistics.median(a["age"] for a in ages),
        "sent": network["uplink_bytes"] / (len(made["rows"]) + 1),  # a version is on its way at the start
        "identical": made["words"] == found["follow"]["words"],
        "valid": network["valid"],
        "busy": network["load"]["before"] > BUSY,
    }
