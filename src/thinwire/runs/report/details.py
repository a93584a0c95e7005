"""The foldable part of the report, and the notes on top of it."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thinwire.runs.records.finished_runs import Run, differences
from thinwire.runs.records.progress import megabytes
from thinwire.runs.records.run_record import LinkInfo
from thinwire.runs.report.plotting import Runs

Rows = Sequence[tuple[str, str]]


def notes(runs: Runs) -> list[str]:
    """Return every warning a reader needs: what differs, what did not finish, what the runs noted."""
    found = differences([run.record for run in runs]) if len(runs) > 1 else []
    found += [_unfinished(run) if run.valid else _invalid(run) for run in runs if run.record.status != "done"]
    said: dict[str, list[str]] = {}
    for run in runs:
        for text in [*run.record.notes, *filter(None, [run.record.unreached])]:
            said.setdefault(text, []).append(run.label)
    return found + [
        text if len(labels) == len(runs) else f"{', '.join(labels)}: {text}" for text, labels in said.items()
    ]


def _unfinished(run: Run[Any]) -> str:
    return f"{run.label} did not finish ({run.record.status}), so its figures cover a part of the run."


def _invalid(run: Run[Any]) -> str:
    return f"{run.label} is no valid measurement, so its times are left out; its notes say why."


def details(runs: Runs, own: Mapping[str, Rows]) -> str:
    """Return the recipes' specs, link, configuration and environment, each in a foldable section.

    ``own``: rows of the engine's, by title. A title without rows is left out.
    """
    first = runs[0].record
    return "".join(
        [
            _fold(
                "What crosses the wire",
                [(run.label, run.record.recipe.spec or "–") for run in runs],
                code=True,
            ),
            _fold("Link", _link(runs)),
            _fold("Traffic", _traffic(runs)),
            _fold("On the wire", [row for run in runs for row in _wire(run)]),
            *(_fold(title, rows) for title, rows in own.items()),
            _fold("Configuration", _configuration(runs)),
            _fold("Environment", list(_flat(first.environment))),
        ]
    )


def _fold(title: str, rows: Sequence[tuple[str, str]], code: bool = False) -> str:
    tag, end = ("<code>", "</code>") if code else ("", "")
    body = "".join(
        f"<tr><td>{html.escape(k)}</td><td>{tag}{html.escape(v)}{end}</td></tr>" for k, v in rows if v
    )
    table = f"<details><summary>{title}</summary><table><tbody>{body}</tbody></table></details>"
    return table if body else ""


def _link(runs: Runs) -> list[tuple[str, str]]:
    alike = len({(run.record.link.asked, run.record.link.emulation) for run in runs}) == 1
    rows = _network(runs[0].record.link) if alike else []
    for run in () if alike else runs:
        rows += [(f"{name}, {run.label}", text) for name, text in _network(run.record.link)]
    for run in runs:
        if run.record.link.rtt_s is not None and run.valid:
            rows.append((f"round trip measured, {run.label}", f"{run.record.link.rtt_s * 1e3:.1f} ms"))
    return rows


def _network(link: LinkInfo) -> list[tuple[str, str]]:
    rows = [("asked for", link.asked), ("emulation", link.emulation)]
    if link.rate_bytes_s:
        rows.append(("rate, each direction", f"{megabytes(link.rate_bytes_s)}/s"))
    if link.delay_s is not None:
        rows.append(("one-way delay", f"{link.delay_s * 1e3:.1f} ms"))
    return [*rows, *_flat(link.emulator)]


def _traffic(runs: Runs) -> list[tuple[str, str]]:
    return [(run.label, ", ".join(_streams(run.record.bytes))) for run in runs]


def _streams(sent: Mapping[str, int]) -> Iterator[str]:
    """Yield each stream's bytes, those of values beside what fp32 and bf16 would be, then the others."""
    streams = [name for name in sent if f"raw_{name}" in sent]
    for name in streams:
        plain = sent[f"raw_{name}"]
        yield f"{name} {megabytes(sent[name])} (fp32: {megabytes(plain)}, bf16: {megabytes(plain / 2)})"
    for name in sent:
        if name not in streams and not name.startswith("raw_"):
            yield f"{name} {megabytes(sent[name])}"


def _wire(run: Run[Any]) -> list[tuple[str, str]]:
    rows = []
    for w in run.record.wire:
        text = f"payload {megabytes(w.payload_bytes)}"
        if w.wire_bytes is not None:
            again = megabytes(w.retransmitted_bytes or 0)
            text += f", as IP packets {megabytes(w.wire_bytes)}, sent again {again}"
        if run.valid and w.min_rtt_s is not None and w.rtt_s is not None:
            text += f", round trip {1e3 * w.min_rtt_s:.1f} ms at least, {1e3 * w.rtt_s:.1f} ms at the end"
        text += f", {w.congestion}" if w.congestion else ""
        rows.append((f"{run.label}, rank {w.source} → {w.destination}", f"{text} ({w.counted})"))
    return rows


def _configuration(runs: Runs) -> list[tuple[str, str]]:
    rows = []
    for key in runs[0].record.config:
        values = list(dict.fromkeys(_text(run.record.config.get(key)) for run in runs))
        rows.append((key, " | ".join(values)))
    return rows


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            rows += [row for i, each in enumerate(value) for row in _flat(each, f"{prefix}{key}[{i}].")]
        else:
            rows.append((prefix + key, _text(value)))
    return rows


def _text(value: Any) -> str:
    return "not set" if value is None else "yes" if value is True else "no" if value is False else str(value)
