"""The page of federated runs: accuracy against traffic and time, who did what, and whose data are whose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from thinwire.runs.records.finished_runs import Run
from thinwire.runs.records.progress import megabytes
from thinwire.runs.report.details import Rows
from thinwire.runs.report.elements import card, grid, memory, run_legend, scroll, table, terminal_table
from thinwire.runs.report.plotting import Points, by_run, lines
from thinwire.uses.federated.run.record import AccuracyPoint, FederatedRecord

FederatedRun = Run[FederatedRecord]
DONE = "done"
Runs = Sequence[FederatedRun]
COLUMNS = ("method", "seed", "accuracy", "best", "versions", "virtual time", "sent up", "sent down",
           "to the target", "up", "down", "× fewer bytes", "× sooner")  # fmt: skip
TABLE = (0, 1, 2, 4, 5, 6, 7, 8, 11, 12)  # of these, what a terminal has room for
CLIENTS = ("client", "samples", "steps a turn", "values sent", "updates", "sent", "got", "versions late")


def headline(runs: Runs) -> str:
    """Return what the run that sent least won over the first that came to the target, good or bad."""
    base = _base(runs)
    others = [run for run in runs if run.record.target and run is not base]
    if not others or base.record.target is None:
        found = [run for run in runs if run.record.accuracy.best is not None]
        if not found:
            return "no federated run came to an evaluation"
        best = max(found, key=lambda run: run.record.accuracy.best or 0.0)
        return f"{best.label} came to {best.record.accuracy.best:.1%} of the held-out samples"
    best = min(others, key=lambda run: _sent(run) or 0)
    fewer, sooner = _against(base, best)
    came = (
        f"{best.label} came to {base.record.target['accuracy']:.0%} with {fewer:.1f}× fewer bytes, both ways,"
    )
    return f"{came} than {base.label}, {sooner:.2f}× sooner"


def setting(runs: Runs) -> str:
    """Return what was learnt, by whom."""
    c = runs[0].record.config
    drawn = (
        f"{c['participate']} of {c['clients']} clients a round"
        if c["participate"]
        else f"{c['clients']} clients"
    )
    free = ", the download free in time" if c["downlink"] == "free" else ""
    return (
        f"{c['model']} on {c['data']}, split {c['split']}, by {drawn} with devices {c['devices']}{free}; "
        f"local steps of {c['batch']} samples at {c['lr']:g}."
    )


def warnings(runs: Runs) -> list[str]:
    """Return what no record's notes say: refused updates, and processes that came to other weights."""
    other = [deployed(run.record) for run in runs if run.record.deployment.get("identical") is False]
    refused = [(run.label, len(run.record.refused)) for run in runs if run.record.refused]
    return other + [
        f"{many} updates of {label} were refused; the record names them." for label, many in refused
    ]


def folds(runs: Runs) -> dict[str, Rows]:
    """Return each run's clients, and the updates that were refused."""
    rows: dict[str, Rows] = {}
    for run in runs:
        if run.record.refused:
            rows[f"Refused: {run.label}"] = [
                (f"client {r.client}, {r.at_s:.1f} s", r.reason) for r in run.record.refused[:200]
            ]
    return rows


def cards(runs: Runs) -> list[str]:
    """Return the cards, in order."""
    text = "Virtual time is that of the clock, not of this machine. Bytes are with their headers."
    if runs[0] is not (base := _base(runs)):
        text += f" Ratios are to {base.label}, the first that came to the target."
    plots = [
        _figure("Accuracy against bytes", runs, _total, "megabytes, both ways (logarithmic)", "x"),
        _figure("Accuracy against virtual time", runs, lambda p: p.virtual_s, "virtual seconds"),
        _figure("Accuracy against versions", runs, lambda p: p.version, "versions"),
        _trend("Share of the values sent", runs, "density", lambda p: p.density),
        _trend("Versions that updates were late", runs, "staleness", lambda p: p.staleness),
    ]
    clients = [card(f"Clients of {run.label}", "", table(CLIENTS, _clients(run.record))) for run in runs[:6]]
    return [
        card("The figures", text, table(COLUMNS, _rows(runs))),
        run_legend(runs),
        grid([*plots, _counts(runs[0].record)]),
        *[_deployment(run.record) for run in runs if run.record.deployment],
        *clients,
        memory(runs),
    ]


def deployed(record: FederatedRecord) -> str:
    """Return in a sentence what came of real processes."""
    d = record.deployment
    same = "the same weights, bit for bit" if d["identical"] else "OTHER weights: please report it"
    timed = f"; {sum(d['seconds']):.1f} s, {d['ratio']:.2f} of what the clock foretold" if d["ratio"] else ""
    return f"{d['processes']} real processes ran {d['method']} and came to {same}{timed}"


def _deployment(record: FederatedRecord) -> str:
    d = record.deployment
    foretold = d["foretold_s"] or [None] * len(d["seconds"])
    rows = [
        [str(i), f"{took:.2f} s", "–" if told is None else f"{told:.2f} s"]
        for i, (took, told) in enumerate(zip(d["seconds"], foretold, strict=False), 1)
    ]
    link = f"emulated links of {d['link']}" if d["emulated"] else "loopback"
    text = f"{deployed(record)}. Over {link}; {d['check']}."
    return card("In real processes", text, table(("version", "took", "foretold"), rows))


def summary_table(runs: Runs) -> Any:
    """Return the figures for a terminal."""
    return terminal_table([COLUMNS[i] for i in TABLE], ([row[i] for i in TABLE] for row in _rows(runs)))


def _total(point: AccuracyPoint) -> float:
    return (point.up + point.down) / 1e6


def _base(runs: Runs) -> FederatedRun:
    """Return the run that others are compared with: the first that came to the target."""
    return next((run for run in runs if run.record.target), runs[0])


def _sent(run: FederatedRun) -> int | None:
    target = run.record.target
    return None if target is None else int(target["up"] + target["down"])


def _against(base: FederatedRun, run: FederatedRun) -> tuple[float, float]:
    """Return how many times fewer bytes, and how many times sooner, a run came to the target."""
    mine, first = run.record.target, base.record.target
    if mine is None or first is None:
        return 0.0, 0.0
    fewer = (first["up"] + first["down"]) / max(1, mine["up"] + mine["down"])
    return fewer, first["virtual_s"] / max(mine["virtual_s"], 1e-9)


def _rows(runs: Runs) -> list[list[str]]:
    return [_row(_base(runs), run) for run in runs]


def _row(base: FederatedRun, run: FederatedRun) -> list[str]:
    r = run.record
    fewer, sooner = _against(base, run)
    target = r.target
    return [
        r.recipe.name,
        str(r.seed),
        "–" if r.accuracy.final is None else f"{r.accuracy.final:.1%}",
        "–" if r.accuracy.best is None else f"{r.accuracy.best:.1%}",
        f"{r.totals.get('rounds', 0):.0f}",
        _span(r.totals.get("virtual_s", 0.0)),
        megabytes(r.bytes.get("up", 0)),
        megabytes(r.bytes.get("down", 0)),
        _arrival(r),
        megabytes(int(target["up"])) if target else "–",
        megabytes(int(target["down"])) if target else "–",
        f"{fewer:.1f}" if fewer else "–",
        f"{sooner:.2f}" if sooner else "–",
    ]


def _arrival(record: FederatedRecord) -> str:
    if record.target:
        return _span(record.target["virtual_s"])
    if record.status != DONE:
        return record.status
    return "not reached" if record.config.get("until") else "–"


def _span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.1f} min"


def _figure(title: str, runs: Runs, of: Callable[[AccuracyPoint], float], label: str, log: str = "") -> str:
    def points(run: FederatedRun) -> list[Points]:
        return [[(of(p), p.accuracy) for p in run.record.accuracy.curve if not log or of(p) > 0]]

    name = "federated-" + title.lower().replace(" ", "-")
    figure = lines(name, f"{title}, one curve a run", by_run(runs, points), label, "accuracy", log)
    return card(title, "", figure)


def _trend(title: str, runs: Runs, name: str, of: Callable[[AccuracyPoint], float | None]) -> str:
    def points(run: FederatedRun) -> list[Points]:
        return [[(p.version, y) for p in run.record.accuracy.curve if (y := of(p)) is not None]]

    told, curves = f"{title} against versions", by_run(runs, points)
    return card(title, "", lines(f"federated-{name}", told, curves, "versions", how="default"))


def _clients(record: FederatedRecord) -> list[list[str]]:
    return [
        [
            str(c.id),
            str(c.samples),
            f"{c.steps:.1f}",
            "–" if c.ratio is None else f"{c.ratio:.2%}",
            str(c.updates),
            megabytes(c.up),
            megabytes(c.down),
            f"{c.staleness:.1f}",
        ]
        for c in record.clients[:50]
    ]


def _counts(record: FederatedRecord) -> str:
    """Return the card of clients by classes: the more samples, the darker."""
    counts = record.counts[:50]
    most = max((n for row in counts for n in row), default=1) or 1
    cell = partial(_cell, most=most)
    rows = "".join(f"<tr><th>{i}</th>{''.join(map(cell, row))}</tr>" for i, row in enumerate(counts))
    head = ["", *map(str, range(len(counts[0]) if counts else 0))]
    text = "Samples of each class, one row a client."
    return card("Whose data are whose", text, scroll(head, rows))


def _cell(count: int, most: int) -> str:
    share = round(100 * count / most)
    return f'<td style="background:color-mix(in srgb, var(--s0) {share}%, transparent)">{count}</td>'
