"""The tables of training for the docs: the demos, links and rounds, plans beside runs, replicas."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.study.tables import DASH, Draw, Row, Rows, columns, percent, table, tabled, times, yes
from thinwire.links.shape import LinkShape
from thinwire.runs.records.finished_runs import Run
from thinwire.uses.kinds import read_record
from thinwire.uses.training.run import replica_cards

NEAR = 0.10  # of what a step took: a prediction within it is called right
BIT = 0.05  # bits a value: below, what was foretold and what was sent are the same number
VERSUS = (  # whom ``auto`` is held against, and over what
    ("sooner than AQ-SGD, one pass", "aqsgd:fw=4,bw=8", "one_epoch"),
    ("to the loss", "aqsgd:fw=4,bw=8", "epochs"),
    ("than TAH-Quant", "tahquant", "epochs"),
    ("than direct, 4 bits", "direct:bits=4", "epochs"),
    ("than thinwire", "thinwire", "epochs"),
)


def _times_bf16(r: dict[str, Any]) -> list[float | None]:
    return list(read_record(r, "a demo's record").times_bf16())  # type: ignore[attr-defined]


@tabled("recipe", "sent", "fewer than fp32", "than bf16", "on the first pass", "bits a value, fw + bw",
        "a step", "faster", "held-out loss")  # fmt: skip
def demo(runs: list[dict[str, Any]]) -> Rows:
    """The runs of the demo side by side."""
    sent = [sum(r["bytes"][k] for k in ("forward", "backward", "control")) for r in runs]
    steps = [r["totals"]["seconds"] / r["totals"]["steps"] for r in runs]
    for r, nbytes, step in zip(runs, sent, steps, strict=True):
        bits = r["bits_per_value"]
        yield [
            f"`{r['recipe']['name']}`",
            f"{nbytes / 1e6:.2f} MB",
            f"{sent[0] / nbytes:.1f}×",
            *(f"{x:.1f}×" if x else DASH for x in _times_bf16(r)),
            f"{bits['forward'] + bits['backward']:.1f}",
            f"{step:.2f} s",
            f"{steps[0] / step:.2f}×",
            f"{r['loss']['eval_first']:.3f} → {r['loss']['eval_final']:.3f}",
        ]


@tabled("recipe", "sent a step", "fewer than fp32", "than bf16", "a step", "held-out loss",
        "to the first one's loss", "sooner")  # fmt: skip
def reached(runs: list[dict[str, Any]]) -> Rows:
    """The replicas of the demo: what each sent, and how soon it came to the loss of the first."""
    target = runs[0]["loss"]["eval_final"]
    found = [replica_cards.reached(Run("", read_record(r, "reached.json")), target) for r in runs]  # type: ignore[arg-type]
    seconds = [None if point is None else point.seconds for point in found]
    sent = [(r["bytes"]["exchange"] + r["bytes"]["control"]) / r["totals"]["steps"] for r in runs]
    for r, nbytes, soon in zip(runs, sent, seconds, strict=True):
        steps = r["totals"]["steps"]
        yield [
            f"`{r['recipe']['name']}`",
            f"{nbytes / 1e3:,.0f} kB",
            f"{sent[0] / nbytes:.1f}×",
            f"{_times_bf16(r)[0]:.1f}×",
            f"{r['totals']['seconds'] / steps:.2f} s",
            f"{r['loss']['eval_first']:.3f} → {r['loss']['eval_final']:.3f}",
            f"{soon:.1f} s" if soon else f"not within {steps:.0f} steps",
            f"{seconds[0] / soon:.1f}×" if soon and seconds[0] else DASH,
        ]


def matrix(model: str, found: Row) -> str:
    """Return the table of shares, those made in rounds where there are any: recipes down, links across."""
    cells = {(r["recipe"], r["link"]): r for r in found["rows"] if r["model"] == model}

    def share(recipe: str, link: str) -> str:
        cell = cells.get((recipe, link), {})
        return percent(cell.get("share_in_rounds") or cell.get("share"))

    recipes = dict.fromkeys(recipe for recipe, _ in cells)
    rows = ([f"`{recipe}`", *(share(recipe, link) for link in found["links"])] for recipe in recipes)
    return table(["recipe", *found["links"]], rows)


details = columns(  # of a model: one row a cell, with everything measured
    lambda model, found: (r for r in found["rows"] if r["model"] == model),
    ("recipe", "`{recipe}`"), ("link", "{link}"), ("how", "{how}"), ("tokens/s", "{tokens_s:.0f}"),
    ("share, first pass", lambda r: percent(r["share_first"])), ("share", lambda r: percent(r["share"])),
    ("communication / compute", "{communication_to_compute:.2f}"), ("MB", "{bytes:.1fM}"),
    ("first pass, s", "{seconds_one_epoch:.0f}"), ("three passes, s", "{seconds:.0f}"),
    ("held-out loss", "{eval_final:.3f}"), ("fp32's loss", lambda r: yes(r["same_loss"])),
)  # fmt: skip
SHARES = (
    ("fp32 keeps", "fp32_keeps"), ("auto, first step", "share_step_one"), ("first pass", "share_first"),
    ("all", "share"), ("bound", "bound"), ("of the bound", "of_bound"),
)  # fmt: skip
goals = columns(  # ``auto`` against its bound and against the published recipes
    "goals", ("model", "{model}"), ("link", "{link}"),
    *((head, lambda g, key=key: percent(g[key])) for head, key in SHARES),
    *(
        (head, lambda g, name=name, span=span: times(g["faster_than"].get(name, {}).get(span)))
        for head, name, span in VERSUS
    ),
    ("auto reaches the loss", lambda g: yes(g["same_loss"])),
)  # fmt: skip


@tabled("auto's", "model", "link", "wanted", "found", "met")
def verdicts(found: Row) -> Rows:
    """Each goal in each cell that it is about, and whether it is met."""
    for v in found["verdicts"]:
        form = "{:.1f} %" if (share := v["goal"].startswith("share")) else "{:.2f}×"
        numbers = (
            DASH if x is None else form.format(100 * x if share else x) for x in (v["wanted"], v["found"])
        )
        yield [v["goal"], v["model"], v["link"], *numbers, yes(v["met"], "**no**", "too close to tell")]


def _each(values: list[float] | None, form: str) -> str:
    return DASH if values is None else " / ".join(format(v, form) for v in values)


in_rounds = columns(  # a study's runs: seconds of each round, and how much sooner ``auto`` was
    lambda study, found: (r for r in found["rounds"] if r["study"] == study),
    ("link", "{link}"), ("recipe", "`{recipe}`"), ("TCP", "{congestion}"), ("MB", "{bytes:.1fM}"),
    ("first step, ms", lambda r: _each([1e3 * v for v in r["step_one"]], ".0f")),
    ("one pass, s", lambda r: _each(r["one_epoch"], ".1f")),
    ("three passes, s", lambda r: _each(r["epochs"], ".1f")),
    ("auto sooner, one pass", lambda r: f"{r['sooner']['one_epoch']:.2f}×" if r["sooner"] else DASH),
    ("three passes", lambda r: f"{r['sooner']['epochs']:.2f}×" if r["sooner"] else DASH),
    ("held-out loss", lambda r: _each(r["eval_final"], ".3f")),
)  # fmt: skip
predictions = columns(  # what the replay says of runs that were made, beside what they took
    "predictions", ("recipe", "`{recipe}`"), ("model", "{model}"), ("link", "{link}"),
    ("a step took", "{measured:.0fm} ms"), ("predicted", "{predicted:.0fm} ms"),
    ("of it", lambda p: percent(p["predicted"] / p["measured"])),
)  # fmt: skip
verified = columns(  # the cells that were also run from the first step to the last
    "verified", ("recipe", "`{recipe}`"), ("model", "{model}"), ("link", "{link}"),
    ("share, product", lambda v: percent(v["product"])),
    ("share, end to end", lambda v: percent(v["whole"])), ("C of the session", "{c[0]:.0fm} ms"),
    ("C of runs end to end", "{c[1]:.0fm} ms"),
)  # fmt: skip


def _bits(r: Row) -> str:
    """Return bits forward and backward: what was foretold, and what was sent where that differs."""
    pairs = zip(r["bits_foretold"], r["bits"], strict=True)
    return ", ".join(f"{a:.1f}" if abs(a - b) < BIT else f"{a:.1f} ({b:.1f})" for a, b in pairs)


_planned = columns(
    "rows", ("recipe", "`{recipe}`"), ("model", "{model}"), ("link", "{link}"),
    ("a step took", "{measured:.0fm} ms ({steps[0]:.0fm} to {steps[1]:.0fm})"),
    ("planned", "{predicted:.0fm} ms"), ("of it", lambda r: percent(r["predicted"] / r["measured"])),
    ("replayed from the run, of it", lambda r: percent(r["replayed"])),
    ("bits planned (sent), fw and bw", _bits),
)  # fmt: skip


def plan(found: Row) -> str:
    """Return each run beside its plan, and in a sentence how many plans were right."""
    ratios = [r["predicted"] / r["measured"] for r in found["rows"]]
    near = sum(abs(x - 1) <= NEAR for x in ratios)
    words = f"Of {len(ratios)} steps, {near} were foretold to within {percent(NEAR)}"
    if ratios:
        words += f"; the plans were {percent(min(ratios))} to {percent(max(ratios))} of what the steps took"
    return f"{_planned(found)}\n\n{words}."


choices = columns(  # the recipe proposed for each link beside the one that was fastest
    "choices", ("link", "{link}"), ("model", "{model}"), ("proposed", "`{proposed}`"),
    ("fastest run", "`{fastest}`"),
    ("the proposed one's step is longer by", lambda c: percent(c["behind"])),
    ("within 4 %", lambda c: yes(c["good"], "**no**")),
)  # fmt: skip


def replicas(job: str, found: Row) -> str:
    """Return seconds to the target by recipe and link, the soonest of each link in bold."""
    rows = [r for r in found["rows"] if r["job"] == job]
    links = [link for link in found["links"] if any(r["link"] == link for r in rows)]
    of = {(r["recipe"], r["link"]): r for r in rows}
    known = {k: [r["seconds"] for r in rows if r["link"] == k and r["seconds"] is not None] for k in links}

    def cell(recipe: str, link: str) -> str:
        if (r := of.get((recipe, link))) is None:
            return ""
        if r["seconds"] is None:
            return "not reached"
        text = f"{r['seconds']:.1f} s" + " (product)" * (r["runs"] == 0)
        return f"**{text}**" if r["seconds"] == min(known[link]) else text

    def lines() -> Rows:
        for recipe in dict.fromkeys(r["recipe"] for r in rows):
            sent = next(of[recipe, link] for link in links if (recipe, link) in of)["bytes"] / 1e3
            shown = f"{sent:,.1f}" if sent < 100 else f"{sent:,.0f}"
            yield [f"`{recipe}`", shown, *(cell(recipe, link) for link in links)]

    return table(["recipe", "kB a step", *links], lines())


def _delays(found: Row) -> Iterator[Row]:
    """Yield the rows of each model and optimiser by how late gradients are."""
    of = {(r["model"], r["optimizer"], r["staleness"]): r for r in found["rows"]}
    for m, o in dict.fromkeys((m, o) for m, o, _ in of):
        yield {"of": f"`{m}`, `{o}`"} | {f"late{n}": of.get((m, o, n)) for n in (0, 1, 2, 4)}


def _safe(row: Row | None) -> str:
    """Return the largest safe learning rate, and the least held-out loss of the row behind it."""
    if row is None:
        return "refused"
    return f"{row['safe']:g} ({min(loss for _, loss in row['losses'] if loss is not None):.3f})"


delays = columns(
    _delays,
    ("model and optimiser", "{of}"), ("at once", lambda r: _safe(r["late0"])),
    ("1 step late", lambda r: _safe(r["late1"])), ("2 late", lambda r: _safe(r["late2"])),
    ("4 late", lambda r: _safe(r["late4"])),
)  # fmt: skip
late_steps = columns(  # the time model against measured steps
    "rows", ("link", lambda r: str(LinkShape.parse(r["link"]))), ("steps late", "{staleness}"),
    ("measured step", "{measured:.0fm} ms"), ("by the model", "{predicted:.0fm} ms"),
    ("off by", "{error:+.0fc} %"),
)  # fmt: skip
fewest = columns(  # long runs of four replicas: bits against loss
    "rows", ("recipe", "`{recipe}`"), ("seeds", "{seeds}"),
    ("bits a parameter and step", "{bits_sent:.4f}"), ("fewer than fp32 all-reduce", "{fewer:,.0f}×"),
    ("held-out loss", "{loss:.3f}"),
    ("above `allreduce`", lambda r: ", ".join(f"{100 * x:+.1f} %" for x in r["above"])),
)  # fmt: skip
coder = columns(  # what an exchange takes beside training
    lambda found: [row for row in found["rows"] if "seconds" in row],
    ("recipe", "`{recipe}`"), ("replicas", "{replicas}"), ("CPU s an exchange", "{seconds:.2f}"),
    ("of 30 steps", "{share:.1fc} %"), ("bits a parameter", "{bits:.2f}"),
)  # fmt: skip
TABLES: dict[str, Draw] = {
    "demo": demo,
    "reached": reached,
    "links-gpt": partial(matrix, "gpt2-lab"),
    "links-smollm": partial(matrix, "smollm2-135m"),
    "links-gpt-all": partial(details, "gpt2-lab"),
    "links-smollm-all": partial(details, "smollm2-135m"),
    "links-goals": goals,
    "links-verdicts": verdicts,
    "links-rounds": partial(in_rounds, "slow"),
    **{f"links-rounds-{s}": partial(in_rounds, s) for s in ("fast", "deep", "elsewhere", "behind")},
    "links-verified": verified,
    "links-predictions": predictions,
    "plan": plan,
    "plan-choices": choices,
    "replicas-gpt": partial(replicas, "gpt2-lab"),
    "replicas-cnn": partial(replicas, "cnn-fashion"),
    "delays": delays,
    "times": late_steps,
    "fewest": fewest,
    "coder": coder,
}
