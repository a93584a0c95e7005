"""The page of followed states: each follower in a table, ages, bytes, and what the newest weights wrote."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from typing import Any

from thinwire.runs.records.finished_runs import Run
from thinwire.runs.records.progress import megabytes
from thinwire.runs.report.details import Rows
from thinwire.runs.report.elements import card, dot, grid, legend, table, terminal_table
from thinwire.runs.report.plotting import RULE, WIDTH, Curve, labelled, lines, new_axes, series_colour
from thinwire.uses.following.run.record import FollowerLog, StateRecord
from thinwire.uses.following.run.state_demo import DASH, seconds

StateRun = Run[StateRecord]
FAULT = "A follower did not end with the publisher's bits. That is a fault; please report it."
TIMES = "times (logarithmic)"
COLOURS = {"writer": 1, "late": 2}  # series of the stylesheet
ABOUT = ("", "patches that came", "bytes of a typical patch", "of the largest", "all bytes that came",
         "against whole versions", "age at arrival, median", "longest pause of its model",
         "ends bit-identical")  # fmt: skip


def headline(runs: Sequence[StateRun]) -> str:
    """Return what came of each run, in a sentence."""
    return "; ".join(map(_headline, runs))


def _headline(run: StateRun) -> str:
    record = run.record
    parts = [
        f"{record.ratio(statistics.median(sizes)):.0f}× fewer at {rate:g}"
        for rate, sizes in _by_rate(run).items()
    ]
    same = "bit-identical at the end" if record.identical else "NOT identical at the end"
    link = record.link.asked.replace("mbit", " Mbit/s").replace("ms", " ms").replace(",", ", ")
    return f"A {megabytes(record.nbytes)} model followed over {link}: {', '.join(parts)}; {same}"


def _by_rate(run: StateRun) -> dict[float, list[float]]:
    """Return bytes of patches that brought one version, by the learning rate of that."""
    sizes: dict[float, list[float]] = {}
    rates = {v.version: v.rate for v in run.metrics}
    for log in run.record.followers.values():
        before = 1  # the base
        for a in log.arrivals:
            if a["version"] == before + 1 and a["version"] in rates:
                sizes.setdefault(rates[int(a["version"])], []).append(a["nbytes"])
            before = int(a["version"])
    return sizes


def setting(runs: Sequence[StateRun]) -> str:
    """Return what was trained and how it was published, in a sentence or two."""
    c = runs[0].record.config
    rates = " then ".join(f"{r:g}" for r in c["rates"])
    return (
        f"{c['model']} on {c['data']}: AdamW on fp32 master weights from a base cast to bf16, "
        f"{c['steps']} steps of {c['batch']} × {c['seq']} tokens at {rates}, published in bf16 "
        "after every step. All processes have the base already and know it by its hash, so it never travels."
    )


def warnings(runs: Sequence[StateRun]) -> list[str]:
    """Return what a reader must know: followers that did not end as they should, times that are too long."""
    said = []
    for record in (run.record for run in runs):
        if record.link.emulator.get("valid") is False:
            late = 1e3 * (record.link.lateness_s or 0)
            said.append(
                f"This machine was busy: the emulated network's packets were {late:.1f} ms late on average, "
                "more than a measurement may have. Ages are that much too high."
            )
        if not record.identical:
            said.append(FAULT)
    return said


def folds(runs: Sequence[StateRun]) -> dict[str, Rows]:
    """Return the engine's rows of the details: none."""
    return {}


def summary_table(runs: Sequence[StateRun]) -> Any:
    """Return the followers of all runs, for a terminal."""
    columns = [ABOUT, *(_follower(run, name) for run in runs for name in run.record.followers)]
    head, *rows = zip(*columns, strict=True)
    return terminal_table(head, rows)


def cards(runs: Sequence[StateRun]) -> list[str]:
    """Return the cards of each run, in order."""
    return [c for run in runs for c in _cards(run)]


def _cards(run: StateRun) -> list[str]:
    record = run.record
    whole = f"A whole version: {megabytes(record.nbytes)}."
    age = "It grows until a version arrives. Grey: the link is cut."
    figures = [
        card("Age of each follower's version", age, _ages(record)),
        card("Bytes of each patch", whole, _points(record, "bytes", "MB (logarithmic)")),
        card(
            "Times smaller than the whole state",
            "Patch by patch.",
            _points(record, "ratio", "times (logarithmic)"),
        ),
        card("Weights that moved", "Of all weights as followers use them, in bf16.", _moved(run)),
    ]
    chips = [(dot(f"--s{_colour(n)}"), f"{n}: {log.role}") for n, log in record.followers.items()]
    wrote = "With the same random numbers: equal weights, equal text."
    return [
        card("The followers", _check(record), _followers(run)),
        legend(chips),
        grid(figures),
        card("What the newest weights wrote", wrote, _texts(record)),
    ]


def _check(record: StateRecord) -> str:
    if not record.identical or record.trained is None:
        return "The check of the last version failed or was not made."
    return (
        f"All ended with version {record.trained['version']}, and the SHA-256 over all its bits is the "
        f"trainer's: {record.trained['digest'][:16]}…"
    )


def _followers(run: StateRun) -> str:
    columns = [ABOUT, *(_follower(run, name) for name in run.record.followers)]
    head, *rows = zip(*columns, strict=True)
    return table(head, rows)


def _follower(run: StateRun, name: str) -> Sequence[str]:
    record, log = run.record, run.record.followers[name]
    sizes, ages = [a["nbytes"] for a in log.arrivals], [a["age"] for a in log.arrivals]
    return [
        f"{name} ({log.role})",
        str(len(sizes)),
        megabytes(statistics.median(sizes)) if sizes else DASH,
        megabytes(max(sizes)) if sizes else DASH,
        megabytes(log.wire_bytes),
        f"{saving(run, log):.0f}× fewer bytes",
        seconds(statistics.median(ages)) if ages else DASH,
        seconds(log.status.get("pause")),
        "yes" if _same(record, log) else "no",
    ]


def saving(run: StateRun, log: FollowerLog) -> float:
    """Return the bytes of all versions since a follower joined, each sent whole, over what came."""
    count = sum(v.at >= (log.joined or 0.0) for v in run.metrics)
    return run.record.ratio(log.wire_bytes / max(1, count)) if log.wire_bytes else 0.0


def _same(record: StateRecord, log: FollowerLog) -> bool:
    ends = (record.trained or {}).get("digest"), (log.finished or {}).get("digest")
    return ends[0] is not None and ends[0] == ends[1]


def _texts(record: StateRecord) -> str:
    rows = [
        f"<tr><td>step {t['step']}</td><td>{html.escape(' '.join(t['text'].split()))}</td></tr>"
        for log in record.followers.values()
        for t in log.texts
    ]
    prompt = f"<p>{html.escape(' '.join(record.config['prompt'].split()))} …</p>"
    return (
        f"{prompt}<details open><summary>{len(rows)} texts</summary><table>{''.join(rows)}</table></details>"
    )


def _ages(record: StateRecord) -> str:
    axes = new_axes(WIDTH, 3.3)
    for name, log in record.followers.items():
        if len(log.cut) == 2:
            axes.axvspan(*log.cut, color=RULE, alpha=0.5)
        xs, ys = record.ages(name)
        if xs:
            axes.plot(xs, ys, color=series_colour(_colour(name)), linewidth=1.4)
    axes.set_ylim(bottom=0)
    title = "Age of each follower's version, against time"
    return labelled(axes, "age", title, "seconds of training", "age, s")


def _points(record: StateRecord, name: str, label: str) -> str:
    def value(nbytes: float) -> float:
        return nbytes / 1e6 if name == "bytes" else record.ratio(nbytes)

    curves = [
        Curve(_colour(who), [(a["version"], value(a["nbytes"])) for a in log.arrivals])
        for who, log in record.followers.items()
        if log.arrivals
    ]
    return lines(name, f"{label} of each patch", curves, "version", label, "y")


def _moved(run: StateRun) -> str:
    shares = Curve(0, [(v.version, 100 * v.changed / (run.record.numel or 1)) for v in run.metrics])
    title = "Share of weights that each version changed"
    return lines("moved", title, [shares], "version", "% of weights (logarithmic)", "y")


def _colour(follower: str) -> int:
    return COLOURS.get(follower, 3)
