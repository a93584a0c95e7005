"""What each recipe makes of each link: SmolLM2-135M and gpt2-lab across kernel TCP in network namespaces.

Run ``python -m bench.training.links`` (``make bench-links``); given names of links or models, their cells
alone. Three kinds of cells, each kept when finished, so it goes on where it was stopped:

- timing: one session a model and link, in which all recipes whose losses do not depend on the link take
  turns on one model in memory: a batch's first visit, then two more, after one of another batch that does
  not count. Uncompressed steps with the shape off are among the turns: their time is C, the yardstick of the
  session. TCP connects anew after them.
- training: one unshaped run a model and recipe, for losses and bytes.
- whole: end-to-end runs over the emulated link: ``auto`` everywhere, every recipe on the trace, and some
  cells of the matrix that check the product of the other two kinds.

Records: ``bench/results/links/``; the summary: ``bench/results/links.json``
(``bench.training.links_summary``).
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.study.cells import RESULTS, check_words, keep
from bench.study.runs import trained
from thinwire.links.profile import profiles
from thinwire.runs.emulator import lift
from thinwire.runs.emulator.session import Emulation
from thinwire.runs.records.runs import slug
from thinwire.runs.records.schema import upgraded_unit
from thinwire.types import MeasurementError

CELLS = RESULTS / "links"
LINKS = {
    "unlimited": "none",
    "1gbit": "1gbit",
    "200+50": "200mbit,50ms",
    "100+50": "100mbit,50ms",
    "10+30": "10mbit,30ms",
    "1.4+30": "1.4mbit,30ms",
    "trace": "trace:lte",
}
CHANGE = "drop"  # 500 Mbit/s, 20, and 500 again: does auto follow?
FIXED = ("fp32", "bf16", "direct:bits=4", "aqsgd:fw=4,bw=8", "aqsgd:fw=3,bw=6", "tahquant", "thinwire")
AUTO = "auto"
JOBS: dict[str, dict[str, Any]] = {
    "gpt2-lab": {"model": "gpt2-lab", "batch": 8, "seq": 128, "steps": 90, "epochs": 3},
    "smollm2-135m": {"model": "smollm2-135m", "batch": 4, "seq": 128, "steps": 24, "epochs": 3},
}
COMMON = {"data": "shakespeare", "microbatches": 4, "tensorboard": False, "save_model": False, "quiet": True}
TURNS = 2
# End-to-end runs of recipes whose matrix cells are products of a timing and a training.
VERIFIED = (
    ("gpt2-lab", "unlimited", "fp32"),
    ("smollm2-135m", "unlimited", "fp32"),
    ("gpt2-lab", "10+30", "fp32"),
    ("gpt2-lab", "10+30", "aqsgd:fw=4,bw=8"),
    ("gpt2-lab", "1.4+30", "tahquant"),
    ("gpt2-lab", "1.4+30", "thinwire"),
    ("smollm2-135m", "1.4+30", "aqsgd:fw=4,bw=8"),
    ("smollm2-135m", "1.4+30", "thinwire"),
)
SESSION = 1800.0  # seconds that a timing session may take
ATTEMPTS = 3  # at a measurement that came out late


def timing(model: str, link: str) -> None:
    """Run the timing session of a model and link."""
    job = JOBS[model] | COMMON | {"steps": 8, "epochs": 1, "eval_samples": 0}
    with tempfile.TemporaryDirectory() as folder, Emulation(profiles([LINKS[link]], 2)) as net:
        net.check()
        out = Path(folder) / "steps.json"
        token = secrets.token_hex(16)
        ranks = []
        for rank in range(2):
            own = job | {"emulate": True, "link": LINKS[link], "host": net.address(rank), "out": folder}
            order = {"job": own, "recipes": FIXED, "turns": TURNS, "out": str(out)}
            place = {"LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "THINWIRE_TOKEN": token}
            place["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch warns that these addresses have no names
            env = os.environ | net.environment(rank) | place | {"THINWIRE_BENCH": json.dumps(order)}
            ranks.append(lift.start(net, rank, [sys.executable, "-m", "bench.training.links_worker"], env))
        codes = [p.wait(SESSION) for p in ranks]
        if any(codes):
            raise SystemExit(f"timing {model} over {link}: a rank ended with {codes}")
        rows = json.loads(out.read_text())
        net.verdict()
        keep(cell_file("timing", model, link), {"job": job, "network": net.describe(), "steps": rows})


def run(kind: str, model: str, place: str, recipe: str, **options: Any) -> None:
    """Run one recipe from the first step to the last; keep its record and its steps under ``place``."""
    record, lines = trained(JOBS[model] | COMMON | {"recipe": recipe} | options, "runs/links")
    steps = [vars(m) | {"links": [vars(k) for k in m.links or ()]} for m in lines]
    keep(cell_file(kind, model, place, recipe), {"record": record.to_dict(), "steps": steps})


def cells() -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, model, link and recipe of every cell, the quick ones first."""
    for model in JOBS:
        for link in LINKS:
            if link != "trace":
                yield "timing", model, link, ""
        yield "whole", model, "unlimited", "fp32"
        for link in LINKS:
            yield "whole", model, link, AUTO
        if model == "gpt2-lab":
            yield "whole", model, CHANGE, AUTO
        for recipe in FIXED:
            yield "training", model, "none", recipe
        for recipe in FIXED:
            yield "whole", model, "trace", recipe
    for model, link, recipe in VERIFIED:
        if link != "unlimited":
            yield "whole", model, link, recipe


def cell_file(kind: str, model: str, link: str, recipe: str = "") -> Path:
    """Return where a cell is kept."""
    return CELLS / f"{kind}-{model}-{link}{'-' + slug(recipe) if recipe else ''}.json"


def read(*cell: str) -> Any:
    """Return a finished cell, or None."""
    file = cell_file(*cell)
    return json.loads(file.read_text()) if file.exists() else None


def sent(found: dict[str, Any]) -> int:
    """Return the bytes of all steps of a run, both directions, evaluations left out."""
    return sum(sum(upgraded_unit(s)["bytes"].values()) for s in found["steps"])


def measure(kind: str, model: str, link: str, recipe: str) -> None:
    """Run one cell; ``MeasurementError`` where the machine was too busy for it."""
    if kind == "timing":
        timing(model, link)
    elif kind == "training":
        evaluate = {"eval_samples": 32, "eval_every": JOBS[model]["steps"] // 6}
        run(kind, model, link, recipe, **evaluate)
    elif link == CHANGE:
        run(kind, model, link, recipe, emulate=True, link=f"trace:{CHANGE}", steps=330, eval_samples=0)
    else:
        run(kind, model, link, recipe, emulate=True, link=LINKS[link], eval_samples=32)


def retried(name: str, work: Callable[[], None]) -> str | None:
    """Do ``work``, again where what it measured does not count; return why not, if so in the end."""
    why = None
    for attempt in range(1, ATTEMPTS + 1):
        print(name, "..." if attempt == 1 else f"attempt {attempt} ...", file=sys.stderr, flush=True)
        try:
            work()
            return None
        except MeasurementError as e:
            why = str(e)
            print(why, file=sys.stderr, flush=True)
    return why


def make_missing(runs: Iterable[tuple[str, Path, Callable[[], None]]]) -> None:
    """Make what has no file yet: names, files, and the work; in the end name what could not be measured."""
    tried = ((name, retried(name, work)) for name, file, work in runs if not file.exists())
    left = [f"{name}: {why}" for name, why in tried if why]
    if left:
        raise SystemExit("not measured: " + "; ".join(left))


def main(wanted: list[str]) -> None:
    """Run what is missing of the cells that ``wanted`` names; all, if it names none."""
    check_words(wanted, cells())
    make_missing(
        (" ".join(cell), cell_file(*cell), partial(measure, *cell))
        for cell in cells()
        if not wanted or set(wanted) & set(cell)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
