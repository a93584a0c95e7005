"""Write the tables and figures of README and docs from the committed results; no number is typed by hand.

Run ``python -m bench.study.pages`` after a study; ``--check`` only says whether a page differs from its
results (a test does that). A table stands between ``<!-- table:NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import re
import sys
from functools import cache
from pkgutil import resolve_name
from typing import Any

from bench.study.cells import RESULTS, ROOT
from bench.study.tables import Draw
from thinwire.runs.records.writer import read_json

FIGURES = ROOT / "docs" / "figures"
MARK = re.compile(r"<!-- table:([a-z_-]+) -->\n.*?<!-- end -->", re.DOTALL)
# Who draws tables: each has TABLES, by name; what stands before the first dash names the result.
MODULES = (
    "ground.codecs", "ground.deltas", "ground.emulator", "ground.throughput",
    "training.tables", "training.quality", "training.student", "training.unbiased", "training.finetuning",
    "swarms.churn", "swarms.scale", "serving.tables", "serving.served_tables",
    "following.tables", "following.hosts.sync_hosts_tables", "pictures.tables",
    "video.wan_times", "video.over_time", "video.part_memory", "pictures.breadth_tables",
    "federated.methods",
    "federated.decided_tables", "scenes.tables", "scenes.refined",
    "models.packed", "models.versions", "models.supernet", "serving.caches", "serving.plan_check",
    "serving.loading", "gpu.tables", "study.record", "papers.page",
)  # fmt: skip


@cache
def tables() -> dict[str, Draw]:
    """Return what draws each table."""
    every: list[dict[str, Draw]] = [resolve_name(f"bench.{module}").TABLES for module in MODULES]
    return {name: draw for own in every for name, draw in own.items()}


def pages() -> list[str]:
    """Return the pages that have a table."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(file.relative_to(ROOT)) for file in every if MARK.search(file.read_text("utf-8"))]


def results(name: str) -> Any:
    """Return the committed result a table is made of, or None where the study has not run yet.

    The tables of the run record are made of the classes that write and read it, those of the papers of the
    cells of many studies.
    """
    first = name.partition("-")[0]
    file = RESULTS / f"{first}.json"
    return {} if first in ("record", "papers") else read_json(file) if file.exists() else None


def drawn(name: str) -> str:
    """Return a table; an unfinished study says so."""
    found = results(name)
    if found is None:
        return "*Not measured yet.*"
    left = len(found.get("missing", ())) if isinstance(found, dict) else 0
    return tables()[name](found) + f"\n\n*{left} cells of this study are not measured yet.*" * bool(left)


def filled(text: str) -> str:
    """Return a page with every marked table made anew."""
    return MARK.sub(lambda mark: f"<!-- table:{mark[1]} -->\n{drawn(mark[1])}\n<!-- end -->", text)


def main() -> int:
    """Write the pages, or with ``--check`` name those that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    texts = {name: (ROOT / name).read_text("utf-8") for name in pages()}
    stale = {name: new for name, text in texts.items() if (new := filled(text)) != text}
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run python -m bench.study.pages", file=sys.stderr)
        return 1
    if not check:
        from bench.study.figures import draw_all

        for name, text in stale.items():
            (ROOT / name).write_text(text, "utf-8")
        draw_all(FIGURES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
