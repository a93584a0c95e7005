"""The tables of ``plan`` for the docs: what was foretold before runs, beside what they took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.study.tables import Rows, table, tabled
from bench.training.pages_links import percent

NEAR = 0.10  # of what a step took: a prediction within it is called right
BIT = 0.05  # bits a value: below, what was foretold and what was sent are the same number


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def _bits(foretold: list[float], found: list[float]) -> str:
    """Return bits forward and backward: what was foretold, and what was sent where that differs."""

    def one(a: float, b: float) -> str:
        return f"{a:.1f}" if abs(a - b) < BIT else f"{a:.1f} ({b:.1f})"

    return ", ".join(map(one, foretold, found))


def steps(found: dict[str, Any]) -> str:
    """Return each run beside its plan, and in a sentence how many plans were right."""

    def rows() -> Rows:
        for r in found["rows"]:
            low, high = r["steps"]
            took = f"{_ms(r['measured'])} ({1e3 * low:.0f} to {1e3 * high:.0f})"
            planned = _ms(r["predicted"]), percent(r["predicted"] / r["measured"])
            bits = _bits(r["bits_foretold"], r["bits"])
            yield [f"`{r['recipe']}`", r["model"], r["link"], took, *planned, percent(r["replayed"]), bits]

    ratios = [r["predicted"] / r["measured"] for r in found["rows"]]
    near = sum(abs(x - 1) <= NEAR for x in ratios)
    head = ["recipe", "model", "link", "a step took", "planned", "of it", "replayed from the run, of it",
            "bits planned (sent), fw and bw"]  # fmt: skip
    words = f"Of {len(ratios)} steps, {near} were foretold to within {percent(NEAR)}"
    if ratios:
        words += f"; the plans were {percent(min(ratios))} to {percent(max(ratios))} of what the steps took"
    return f"{table(head, rows())}\n\n{words}."


@tabled("link", "model", "proposed", "fastest run", "the proposed one's step is longer by", "within 4 %")
def choices(found: dict[str, Any]) -> Rows:
    """Return the recipe proposed for each link beside the one that was fastest."""
    for c in found["choices"]:
        words = "yes" if c["good"] else "**no**"
        names = (f"`{c[k]}`" for k in ("proposed", "fastest"))
        yield [c["link"], c["model"], *names, percent(c["behind"]), words]


TABLES: dict[str, Callable[[Any], str]] = {"plan": steps, "plan-choices": choices}
