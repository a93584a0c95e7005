"""The tables of docs/papers.md."""

from __future__ import annotations

from collections import Counter
from functools import partial

from bench.papers.claims import RATIO, Claim, current, shown
from bench.papers.verdicts import Verdict
from bench.study.tables import DASH, Draw, Rows, table, tabled

FIELDS = ("links", "federated", "pictures", "models", "scenes")
HEADS = [
    "what is claimed",
    "its setting",
    "setting here",
    "holds above",
    "published",
    "found here",
    "verdict",
    "by",
]


@tabled("paper", *Verdict)
def papers(_: object) -> Rows:
    """How many claims of each paper came to each verdict."""
    counted: dict[str, Counter[Verdict]] = {}
    for claim in current():
        counted.setdefault(claim.paper, Counter())[claim.verdict[0]] += 1
    total = sum(counted.values(), Counter[Verdict]())
    for paper, found in {**counted, "all": total}.items():
        yield [paper, *(str(found[verdict] or DASH) for verdict in Verdict)]


def claims(field: str, _: object) -> str:
    """Every claim of a field; its cells are text, which stands to the left."""
    rows = (_row(claim) for claim in current() if claim.field == field)
    return table(HEADS, rows).replace("---:|", "---|")


def _row(claim: Claim) -> list[str]:
    verdict, told = claim.verdict
    bold = told.replace(verdict, f"**{verdict}**", 1)
    by = f"`make {claim.target}`" if claim.target else DASH
    ends = [_amount(x, claim.unit) for x in (claim.above, claim.published)]
    measured = bool(claim.measure or claim.wanting)
    name = f"{claim.paper.partition(',')[0]}: {claim.claim}"
    return [
        name,
        claim.setting,
        claim.here or DASH,
        ends[0] if measured else DASH,
        ends[1],
        _found(claim),
        bold,
        by,
    ]


def _found(claim: Claim) -> str:
    if claim.found is None:
        return DASH
    many = len(claim.values)
    of = f", {many} of {claim.runs} runs" if many < claim.runs else f", {many} runs"
    return shown(claim.found, claim.unit) + of


def _amount(x: float | None, unit: str) -> str:
    return DASH if x is None else f"{x:g}{RATIO}" if unit == RATIO else f"{x:g} {unit}".strip()


TABLES: dict[str, Draw] = {
    "papers": papers,
    **{f"papers-{field}": partial(claims, field) for field in FIELDS},
}
