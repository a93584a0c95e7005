"""Tables of the breadth study: which mode takes which transformer, and the sentences that refuse others."""

from __future__ import annotations

import re
from typing import Any

from bench.study.tables import DASH, Draw, Row, table


def modes(found: Row) -> str:
    """A row a class, a column a mode."""
    rows: list[Row] = found["rows"]
    names = list(rows[0]["modes"])
    return table(
        ["transformer", "pipelines", *(f"`{mode}`" for mode in names)],
        ([f"`{r['kind']}`", str(len(r["pipelines"])), *(word(r["modes"][m]) for m in names)] for r in rows),
    )


def word(verdicts: list[str]) -> str:
    """Return what a mode makes of all models of a class.

    >>> word(["yes"]), word(["no", "yes"]), word([])
    ('yes', 'in part', '–')
    """
    if not verdicts:
        return DASH
    return verdicts[0] if len(verdicts) == 1 else "failed" if "failed" in verdicts else "in part"


def refusals(found: Row) -> str:
    """A row a sentence, with the classes that it is of; names and numbers of a class are dots."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in found["rows"]:
        for mode, text in row["refused"]:
            said = re.sub(r"\b[\w.]*(?:attn\d?|attention)\b", "…", text.replace(row["kind"], "…"))
            kinds = groups.setdefault((mode, re.sub(r"\d+ (frames|rows|columns)", r"… \1", said)), [])
            kinds.append(row["kind"])
    rows = [[f"`{mode}`", text, named(kinds)] for (mode, text), kinds in groups.items()]
    return table(["mode", "sentence", "of"], sorted(rows))


def named(kinds: list[str]) -> str:
    """Return some names, or how many there are."""
    return ", ".join(f"`{kind}`" for kind in kinds) if len(kinds) < 5 else f"{len(kinds)} classes"


def told(found: Row) -> str:
    """How many classes each mode takes, of those that were tried."""
    tried: list[dict[str, Any]] = [r for r in found["rows"] if r["models"]]
    rows = []
    for mode in tried[0]["modes"]:
        words = [word(r["modes"][mode]) for r in tried]
        counts = [sum(w in group for w in words) for group in (("yes", "near"), ("in part",), ("no",))]
        rows.append([f"`{mode}`", *map(str, counts)])
    return table(["mode", "takes", "in part", "refuses"], rows)


TABLES: dict[str, Draw] = {"breadth": modes, "breadth-refused": refusals, "breadth-counts": told}
