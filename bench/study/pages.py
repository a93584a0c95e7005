"""Write the tables and figures of README and docs from the committed results; no number is typed by hand.

Run ``python -m bench.study.pages`` after a study; ``--check`` only says whether a page differs from its
results (a test does that). A table stands between ``<!-- table:NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.federated import tables as pages_federated
from bench.following import tables as pages_state
from bench.models import supernet_tables as pages_supernet
from bench.models import tables as pages_models
from bench.pictures import experts_tables as pages_experts
from bench.pictures import tables as pages_pictures
from bench.scenes import tables as pages_scenes
from bench.study import pages_record, pages_shown
from bench.study.cells import RESULTS, ROOT
from bench.study.tables import Rows, table, tabled
from bench.training import pages_finetuning, pages_links, pages_plan, pages_replicas
from thinwire.runs.records.runs import Run
from thinwire.uses.kinds import read_record
from thinwire.uses.training.run.record import reaching

FIGURES = ROOT / "docs" / "figures"
PAGES = (
    "README.md",
    "docs/quickstart.md",
    "docs/results.md",
    "docs/links.md",
    "docs/planning.md",
    "docs/planning-results.md",
    "docs/student-paper.md",
    "docs/state.md",
    "docs/replicas.md",
    "docs/replicas-results.md",
    "docs/pictures.md",
    "docs/pictures-results.md",
    "docs/federated.md",
    "docs/federated-results.md",
    "docs/scenes.md",
    "docs/scenes-results.md",
    "docs/models.md",
    "docs/models-results.md",
    "docs/state-results.md",
    "docs/concepts.md",
    "docs/finetuning.md",
    "docs/run-record.md",
)
MARK = re.compile(r"<!-- table:([a-z-]+) -->\n.*?<!-- end -->", re.DOTALL)


def results(name: str) -> Any:
    """Return the committed result a table is made of, or None where the study has not run yet.

    The tables of the run record are made of the classes that write and read it.
    """
    if name in pages_record.TABLES:
        return pages_record.TABLES[name]
    file = RESULTS / f"{name.partition('-')[0]}.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else None


def percent(x: float) -> str:
    return f"{100 * x:+.2f} %"


@tabled(
    "recipe",
    "sent",
    "fewer than fp32",
    "than bf16",
    "on the first pass",
    "bits a value, fw + bw",
    "a step",
    "faster",
    "held-out loss",
)
def demo(runs: list[dict[str, Any]]) -> Rows:
    """The runs of the demo side by side."""
    base = runs[0]

    for r in runs:
        sent = sum(r["bytes"][k] for k in ("forward", "backward", "control"))
        all_fp32 = sum(base["bytes"][k] for k in ("forward", "backward", "control"))
        step, slowest = (x["totals"]["seconds"] / x["totals"]["steps"] for x in (r, base))
        bits = r["bits_per_value"]
        yield [
            f"`{r['recipe']['name']}`",
            f"{sent / 1e6:.2f} MB",
            f"{all_fp32 / sent:.1f}×",
            *(f"{x:.1f}×" if x else "–" for x in read_record(r, "demo.json").times_bf16()),  # type: ignore[attr-defined]
            f"{bits['forward'] + bits['backward']:.1f}",
            f"{step:.2f} s",
            f"{slowest / step:.2f}×",
            f"{r['loss']['eval_first']:.3f} → {r['loss']['eval_final']:.3f}",
        ]


@tabled(
    "recipe",
    "sent a step",
    "fewer than fp32",
    "than bf16",
    "a step",
    "held-out loss",
    "to the first one's loss",
    "sooner",
)
def reached(runs: list[dict[str, Any]]) -> Rows:
    """The replicas of the demo: what each sent, and how soon it came to the loss of the first."""
    target = runs[0]["loss"]["eval_final"]
    found = [reaching.reached(Run("", read_record(r, "reached.json")), target) for r in runs]  # type: ignore[arg-type]
    seconds = [None if point is None else point.seconds for point in found]
    first = seconds[0]
    for r, soon in zip(runs, seconds, strict=True):
        steps = r["totals"]["steps"]
        sent, base = (
            (x["bytes"]["exchange"] + x["bytes"]["control"]) / x["totals"]["steps"] for x in (r, runs[0])
        )
        yield [
            f"`{r['recipe']['name']}`",
            f"{sent / 1e3:,.0f} kB",
            f"{base / sent:.1f}×",
            f"{read_record(r, 'reached.json').times_bf16()[0]:.1f}×",  # type: ignore[attr-defined]
            f"{r['totals']['seconds'] / steps:.2f} s",
            f"{r['loss']['eval_first']:.3f} → {r['loss']['eval_final']:.3f}",
            f"{soon:.1f} s" if soon else f"not within {steps:.0f} steps",
            f"{first / soon:.1f}×" if soon and first else "–",
        ]


@tabled("recipe", "processor", "learning rate", "bits fw + bw", "held-out", "against fp32",
        "of fp32's gain", "train slice", "against fp32", "within bounds")  # fmt: skip
def quality(found: dict[str, Any]) -> Rows:
    """Every recipe against fp32: bits, losses, the three bounds."""
    for r in found["recipes"]:
        c, losses = r["check"], r["losses"]
        yield [
            f"`{r['recipe']}`",
            r["cpu"].split("(")[0].split()[0],
            f"{r['learning_rate']:g}",
            f"{r['bits']:.2f}",
            f"{losses['eval_final']:.4f}",
            percent(c["heldout"]),
            percent(c["of_gain"]),
            f"{losses['train_eval_final']:.4f}",
            percent(c["train_slice"]),
            "yes" if c["met"] else "no",
        ]
    c = found["frozen"]
    yield ["frozen model (control)", "", "", "0", "", *map(percent, (c["heldout"], c["of_gain"])), "",
           percent(c["train_slice"]), "yes" if c["met"] else "no"]  # fmt: skip


@tabled("recipe", "sent", "fewer bytes than fp32", "than bf16", "median step", "faster",
        "train loss, last 10 steps", "held-out loss")  # fmt: skip
def student(found: dict[str, Any]) -> Rows:
    """The student paper's comparison, as measured here."""
    base = found["rows"][0]

    for r in found["rows"]:
        yield [
            f"`{r['recipe']}`",
            f"{r['bytes'] / 1e6:.1f} MB",
            *(f"{100 * (1 - n * r['bytes'] / r['raw_bytes']):.1f} %" for n in (1, 2)),
            f"{r['median_step_s']:.3f} s",
            f"{base['median_step_s'] / r['median_step_s']:.2f}×",
            f"{r['train_loss_last10']:.4f}",
            f"{r['eval_first']:.3f} → {r['eval_final']:.4f}",
        ]


@tabled("of", "memory", "residual's energy", "error, 2 bits", "4 bits", "8 bits")
def deltas(found: dict[str, Any]) -> Rows:
    """What each memory leaves to send, and the error at equal bits."""
    for r in found["rows"]:
        yield [
            r["of"],
            r["memory"],
            f"{r['energy']:.4f}",
            *(f"{r['error'][b]:.4f}" for b in ("2", "4", "8")),
        ]


@tabled("recipe", "bits forward", "backward", "held-out against fp32", "train slice")
def unbiased(found: dict[str, Any]) -> Rows:
    """What coarser gradients cost, with a bias and without: above fp32 of the same seed."""

    def above(r: dict[str, Any], name: str) -> str:
        return f"{100 * r[name]:+.2f} ± {100 * r[name + '_error']:.2f} %"

    for r in found["recipes"]:
        bits = (f"{r['bits_' + way]:.2f}" for way in ("forward", "backward"))
        yield [f"`{r['recipe']}`", *bits, above(r, "heldout"), above(r, "train_slice")]


def codecs(found: dict[str, Any]) -> str:
    """Speed of the codecs at the smallest size measured, and what the machine did besides."""
    from bench.ground.codecs import CHANNELS_OF, CODECS
    from thinwire.codecs import parse_codec

    smallest = min(r["input_bytes"] for r in found["rows"])

    rows = [
        [
            f"`{r['codec']}`",
            f"{r['bits_per_value']:.2f}",
            *(f"{r[f'{k}_gb_s']:.2f}" for k in ("encode", "decode", "both")),
            f"{r['share_of_memcpy']:.1%}",
        ]
        for r in found["rows"]
        if r["input_bytes"] == smallest
    ]
    measured = {r["codec"] for r in found["rows"]}
    missing = [n for n in (*(repr(parse_codec(c)) for c in CODECS), *CHANNELS_OF) if n not in measured]
    machine = found["machine"]
    note = f"The system's load was {machine['load']:.1f} on {machine['cores']} cores at the end."
    if missing:
        note += f" Not measured yet: {', '.join(f'`{n}`' for n in missing)}."
    head = ["codec", "bits a value", "encode, GB/s", "decode, GB/s", "both, GB/s", "both, share of a copy's"]
    return f"{table(head, rows)}\n\n{note}"


def emulator(found: dict[str, Any]) -> str:
    """What iperf3 and ping find across emulated links, by congestion control."""
    cells: dict[str, Any] = found["cells"]

    def rows() -> Rows:
        for name in dict.fromkeys(n.rpartition(",")[0] for n in cells):
            both = [cells.get(f"{name},{congestion}") for congestion in ("cubic", "bbr")]
            link = name.replace("mbit", " Mbit/s").replace("ms", " ms").replace(",", ", ")
            asked = f"{next(c['rate_asked'] for c in both if c) / 125e3:.2f}"
            yield [link, asked, *(text for c in both for text in measured(c))]

    def measured(c: dict[str, Any] | None) -> list[str]:
        if c is None or not c["valid"]:
            return ["not measured" if c is None else "late, so invalid", "", ""]
        late = f"{c['lateness']['mean'] * 1e3:.2f}"
        before = "; before: ".join(["", *(percent(rate / c["rate_asked"] - 1) for rate in c["earlier"])])
        return [
            f"{c['rate'] / 125e3:.2f} ({percent(c['rate_off'])}{before})",
            f"{c['trip'] * 1e3:.2f}",
            late,
        ]

    each = ("Mbit/s (off by)", "ping, ms", "late, ms")
    heads = [f"{congestion}: {what}" for congestion in ("cubic", "bbr") for what in each]
    shares = [c["cpu_share"] for c in cells.values() if c["valid"]]
    note = f"The relay took {100 * min(shares):.0f} to {100 * max(shares):.0f} % of a core in these cells"
    links = results("links")
    if links and links["relay_share"]:
        note += f", and {pages_links.relay(links)} in those of [the study of links](links.md)"
    return f"{table(['link, one way', 'headers leave', *heads], rows())}\n\n{note}."


def of_study(draw: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return the table of a study in cells; an unfinished study says so."""

    def drawn(found: Any) -> str:
        missing = len(found["missing"])
        return draw(found) + (f"\n\n*{missing} cells of this study are not measured yet.*" if missing else "")

    return drawn


TABLES: dict[str, Callable[[Any], str]] = {
    "demo": demo,
    "reached": reached,
    "quality": quality,
    "student": student,
    "deltas": deltas,
    "unbiased": unbiased,
    "codecs": codecs,
    "emulator": emulator,
    "links-gpt": of_study(partial(pages_links.matrix, "gpt2-lab")),
    "links-smollm": of_study(partial(pages_links.matrix, "smollm2-135m")),
    "links-gpt-all": of_study(partial(pages_links.details, "gpt2-lab")),
    "links-smollm-all": of_study(partial(pages_links.details, "smollm2-135m")),
    "links-goals": of_study(pages_links.goals),
    "links-verdicts": of_study(pages_links.verdicts),
    "links-rounds": of_study(partial(pages_links.in_rounds, "slow")),
    "links-rounds-fast": of_study(partial(pages_links.in_rounds, "fast")),
    "links-rounds-deep": of_study(partial(pages_links.in_rounds, "deep")),
    "links-rounds-elsewhere": of_study(partial(pages_links.in_rounds, "elsewhere")),
    "links-rounds-behind": of_study(partial(pages_links.in_rounds, "behind")),
    "links-verified": of_study(pages_links.verified),
    "links-predictions": of_study(pages_links.predictions),
    **{name: of_study(draw) for name, draw in (pages_plan.TABLES | pages_state.TABLES).items()},
    **{name: of_study(draw) for name, draw in pages_federated.STUDY.items()},
    **pages_replicas.TABLES,
    **{name: of_study(draw) for name, draw in pages_replicas.STUDY.items()},
    **pages_pictures.TABLES,
    **pages_experts.TABLES,
    **pages_supernet.TABLES,
    **pages_models.TABLES,
    **dict.fromkeys(pages_record.TABLES, lambda draw: draw()),
    "followed": pages_state.followed,
    "shown": pages_shown.shown,
    "packed": pages_shown.packed,
    **pages_finetuning.TABLES,
    **{name: of_study(draw) for name, draw in pages_scenes.TABLES.items()},
}


def filled(text: str) -> str:
    """Return a page with every marked table made anew."""

    def one(match: re.Match[str]) -> str:
        name = match[1]
        found = results(name)
        body = "*Not measured yet.*" if found is None else TABLES[name](found)
        return f"<!-- table:{name} -->\n{body}\n<!-- end -->"

    return MARK.sub(one, text)


def main() -> int:
    """Write the pages, or with ``--check`` name those that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name in PAGES:
        path = ROOT / name
        text = path.read_text("utf-8")
        if filled(text) != text:
            stale.append(name)
            if not check:
                path.write_text(filled(text), "utf-8")
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run python -m bench.study.pages", file=sys.stderr)
        return 1
    if not check:
        from bench.study.figures import draw_all

        draw_all(FIGURES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
