"""The page of swarms: the loss, who was there when, what rounds were made of, and who was refused and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.runs.records.finished_runs import Run
from thinwire.runs.records.progress import megabytes
from thinwire.runs.report.details import Rows
from thinwire.runs.report.elements import card, grid, memory, run_legend, table, terminal_table
from thinwire.runs.report.plotting import Points, by_run, labelled, lines, new_axes, part_colour
from thinwire.uses.training.swarm.run.record import MemberFigures, RoundFigures, SwarmRecord

if TYPE_CHECKING:
    from rich.table import Table

SwarmRun = Run[SwarmRecord]
Runs = Sequence[SwarmRun]
COLUMNS = ("run", "rounds", "members", "samples", "held-out loss", "all stayed, none lied", "sent up",
           "sent down", "bits a value and round", "refused")  # fmt: skip
MEMBERS = ("member", "there", "rounds", "samples", "sent", "got", "weight", "refused")
TIMELINE, ROW = 7.0, 0.24  # inches: how wide, and how high for each member


def headline(runs: Runs) -> str:
    """Return where the first run ended, beside the run in which all stayed, and whether all hold the same."""
    record = runs[0].record
    loss, clean = record.loss.eval_final, record.clean_loss
    if loss is None:
        many = len(record.rounds)  # a branch evaluates nothing: its keeper does
        return f"{many} rounds, whose loss is at the keeper" if many else "no round was made"
    beside = f", {loss / clean - 1:+.1%} of a run in which all stayed and none lied" if clean else ""
    held = set(record.equal.values())
    same = (
        "" if not held else ", all with the same bits" if len(held) == 1 else ", NOT all with the same bits"
    )
    there = f"{len(record.equal)} members at the end{same}" if held else f"{len(record.members)} members"
    return f"{_rounds(record)} rounds to a held-out loss of {loss:.3f}{beside}; {there}"


def setting(runs: Runs) -> str:
    """Return what was learnt, and how."""
    c = runs[0].record.config
    whose = "texts of the members' own" if c.get("own_data") else c.get("data")
    how = f"adapters of rank {c['lora']}" if c.get("lora") else "all weights"
    return (
        f"{c['model']} ({how}) on {whose}; about {c['local_steps']} local steps a round, "
        f"of {c['batch']} samples of {c['seq']} tokens."
    )


def warnings(runs: Runs) -> list[str]:
    """Return what no record's notes say: members that hold other bits."""
    return [
        f"members of {run.label} end with different bits: please report it"
        for run in runs
        if len(set(run.record.equal.values())) > 1
    ]


def folds(runs: Runs) -> dict[str, Rows]:
    """Return each run's members that were refused, and why."""
    return {
        f"Refused: {run.label}": [(m.name, "; ".join(m.refused)) for m in run.record.members if m.refused]
        for run in runs
        if any(m.refused for m in run.record.members)
    }


def cards(runs: Runs) -> list[str]:
    """Return the cards, in order."""
    text = "Bytes are of updates and versions, with their headers and the members' samples."
    plots = [
        _figure("Held-out loss against time", runs, _loss(lambda e: e.seconds), "seconds", "nats a token"),
        _figure("Held-out loss against rounds", runs, _loss(lambda e: e.step), "rounds", "nats a token"),
        _figure("How long rounds took", runs, _rounds_of(lambda r: r.seconds), "rounds", "seconds"),
        _figure("Updates that counted", runs, _rounds_of(lambda r: r.counted), "rounds", "updates"),
    ]
    each = [card(f"Members of {run.label}", _REASONS, _members(run.record)) for run in runs[:4]]
    return [
        card("The figures", text, table(COLUMNS, [_row(run) for run in runs])),
        run_legend(runs),
        *[card(f"Who was there: {run.label}", _THERE, _timeline(run.record)) for run in runs[:4]],
        grid(plots),
        *each,
        memory(runs),
    ]


def summary_table(runs: Runs) -> Table:
    """Return the figures for a terminal."""
    return terminal_table(COLUMNS, (_row(run) for run in runs))


_THERE = "One row a member; marked where an update was refused or did not count."
_REASONS = "The last reason why an update was refused or did not count; the record has all of them."


def _rounds(record: SwarmRecord) -> int:
    return int(record.totals.get("rounds", 0))


def _row(run: SwarmRun) -> list[str]:
    r = run.record
    bits = [
        r.bytes.get(way, 0) * 32 / raw if (raw := r.bytes.get(f"raw_{way}", 0)) else None
        for way in ("up", "down")
    ]
    return [
        run.label,
        str(_rounds(r)),
        str(len(r.members)),
        f"{r.totals.get('samples', 0):.0f}",
        _nats(r.loss.eval_final),
        _nats(r.clean_loss),
        megabytes(r.bytes.get("up", 0)),
        megabytes(r.bytes.get("down", 0)),
        " / ".join("–" if b is None else f"{b:.2f}" for b in bits),
        str(sum(bool(m.refused) for m in r.members)),
    ]


def _nats(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.3f}"


def _members(record: SwarmRecord) -> str:
    return table(MEMBERS, [_member(m, record) for m in record.members[:100]])


def _member(m: MemberFigures, record: SwarmRecord) -> list[str]:
    end = record.totals.get("seconds", 0.0)
    there = sum((end if until is None else until) - (begun or 0.0) for begun, until in m.spells)
    return [
        m.name,
        f"{there:.0f} s",
        str(m.rounds),
        str(m.samples),
        megabytes(m.up),
        megabytes(m.down),
        f"{m.weight:.2f}",
        m.refused[-1] if m.refused else "–",
    ]


def _timeline(record: SwarmRecord) -> str:
    """Return bars of when each member was there."""
    members = record.members[:100]
    axes = new_axes(TIMELINE, 0.7 + ROW * max(2, len(members)))
    end = max(record.totals.get("seconds", 0.0), 1e-3)
    for i, m in enumerate(members):
        colour = part_colour(3 if m.weight == 0 else 0)
        for begun, until in m.spells:
            start = begun or 0.0
            axes.barh(i, (end if until is None else until) - start, left=start, height=0.6, color=colour)
    axes.set_yticks(range(len(members)), [m.name for m in members])
    axes.set_xlim(0, end)
    axes.invert_yaxis()
    when = "when each member was there"
    return labelled(axes, "swarm-timeline", when, "seconds since the first round began")


def _loss(x: Callable[[Any], float | None]) -> Callable[[SwarmRun], list[Points]]:
    def points(run: SwarmRun) -> list[Points]:
        found = [(x(e), e.heldout) for e in run.record.loss.evaluations]
        return [[(at, loss) for at, loss in found if at is not None and loss is not None]]

    return points


def _rounds_of(y: Callable[[RoundFigures], float]) -> Callable[[SwarmRun], list[Points]]:
    return lambda run: [[(r.number, y(r)) for r in run.record.rounds]]


def _figure(title: str, runs: Runs, points: Callable[[SwarmRun], list[Points]], x: str, y: str) -> str:
    name = "swarm-" + title.lower().replace(" ", "-")
    return card(title, "", lines(name, f"{title}, one curve a run", by_run(runs, points), x, y))
