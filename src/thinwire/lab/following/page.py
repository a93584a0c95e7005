"""The state demo's report: one HTML file that opens offline."""

from __future__ import annotations

import html
import statistics
from pathlib import Path

import thinwire
from thinwire.lab.following.board import DASH, seconds
from thinwire.lab.following.record import Log, Record
from thinwire.lab.records.progress import megabytes
from thinwire.lab.report.drawing import FAINT, RULE, curve, logarithmic, new_figure, svg
from thinwire.lab.report.style import CSS
from thinwire.replacing import replacing

COLOURS = {"writer": 1, "late": 2}  # series of the stylesheet
ABOUT = ("", "patches that came", "bytes of a typical patch", "of the largest", "all bytes that came",
         "against whole versions", "age at arrival, median", "longest pause of its model",
         "ends bit-identical")  # fmt: skip


def write_report(record: Record, path: str | Path) -> Path:
    """Write the report to ``path``, whole or not at all; ``MissingExtra`` without matplotlib."""
    target = Path(path)
    text = report_html(record)
    with replacing(target) as temporary:
        temporary.write_text(text, "utf-8")
    return target


def headline(record: Record) -> str:
    """Return what the demo showed, in a sentence."""
    parts = []
    for rate, sizes in _by_rate(record).items():
        parts.append(f"{record.ratio(statistics.median(sizes)):.0f}× fewer at {rate:g}")
    same = "bit-identical at the end" if record.identical else "NOT identical at the end"
    return f"A {megabytes(record.nbytes)} model followed over {_link(record)}: {', '.join(parts)}; {same}"


def _link(record: Record) -> str:
    return str(record.network["link"]).replace("mbit", " Mbit/s").replace("ms", " ms").replace(",", ", ")


def _by_rate(record: Record) -> dict[float, list[float]]:
    """Return bytes of patches that brought one version, by the learning rate of that."""
    found: dict[float, list[float]] = {}
    rates = {v["version"]: v["rate"] for v in record.published}
    for log in record.followers.values():
        before = 1  # the base
        for a in log.arrivals:
            if a["version"] == before + 1 and a["version"] in rates:
                found.setdefault(rates[a["version"]], []).append(a["nbytes"])
            before = int(a["version"])
    return found


def report_html(record: Record) -> str:
    """Return the report as one self-contained page."""
    title = headline(record)
    body = [
        f'<div class="brand"><b>thinwire</b><span>state synchronisation</span></div>'
        f'<h1>{html.escape(title)}</h1><p class="lede">{html.escape(_setting(record))}</p>',
        _notes(record),
        _card("The followers", _check(record), _followers(record)),
        _legend(record),
        '<div class="grid">',
        _card("Age of what each follower holds", "It grows until a version arrives. Grey: the link is cut.",
              age_figure(record)),
        _card("Bytes of each patch", f"A whole version: {megabytes(record.nbytes)}.", bytes_figure(record)),
        _card("Times smaller than the whole state", "Patch by patch.", ratio_figure(record)),
        _card("Weights that moved", "Of all weights as followers use them, in bf16.", moved_figure(record)),
        "</div>",
        _card("What the newest weights wrote", "With the same random numbers: equal weights, equal text.",
              _texts(record)),
        f"<footer>Made by thinwire {thinwire.__version__} from state.json beside it.</footer>",
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>thinwire: {html.escape(title)}</title><style>{CSS}</style></head>\n"
        f"<body><main>\n{''.join(body)}\n</main></body></html>\n"
    )


def _setting(record: Record) -> str:
    plan = record.plan
    rates = " then ".join(f"{r:g}" for r in plan["rates"])
    return (
        f"{plan['model']} on {plan['data']}: AdamW on fp32 master weights from a base cast to bf16, "
        f"{plan['steps']} steps of {plan['batch']} × {plan['seq']} tokens at {rates}, published in bf16 "
        "after every step. All processes have the base already and know it by its hash, so it never travels."
    )


def _notes(record: Record) -> str:
    found = []
    network = record.network
    if network["kind"] == "throttled":
        found.append(
            "The link is a throttled TCP proxy inside each follower, not an emulated network: headers and "
            f"losses cost nothing. Why: {network['note']}."
        )
    elif not network.get("valid", True):
        late = network["lateness"]["mean"] * 1e3
        found.append(
            f"This machine was busy: the emulated network's packets were {late:.1f} ms late on average, more "
            "than a measurement may have. Ages are that much too high."
        )
    if not record.identical:
        found.append("A follower did not end with the publisher's bits. That is a fault; please report it.")
    items = "".join(f"<li>{html.escape(text)}</li>" for text in found)
    return f'<section class="card notes"><h2>Read this first</h2><ul>{items}</ul></section>' if items else ""


def _check(record: Record) -> str:
    if not record.identical or record.trained is None:
        return "The check of the last version failed or was not made."
    return (
        f"Both ended with version {record.trained['version']}, and the SHA-256 over all its bits is the "
        f"trainer's: {record.trained['digest'][:16]}…"
    )


def _card(title: str, text: str, body: str) -> str:
    words = f"<p>{html.escape(text)}</p>" if text else ""
    return f'<section class="card"><h2>{html.escape(title)}</h2>{words}{body}</section>\n'


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    top = "".join(f"<th>{html.escape(c)}</th>" for c in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _followers(record: Record) -> str:
    columns = [ABOUT, *(_follower(record, name, log) for name, log in record.followers.items())]
    head, *rows = zip(*columns, strict=True)
    return _table(head, [list(row) for row in rows])


def _follower(record: Record, name: str, log: Log) -> list[str]:
    sizes, ages = [a["nbytes"] for a in log.arrivals], [a["age"] for a in log.arrivals]
    same = record.trained is not None and log.finished is not None
    same = same and log.finished["digest"] == record.trained["digest"]  # type: ignore[index]
    return [
        f"{name} ({log.role})",
        str(len(sizes)),
        megabytes(statistics.median(sizes)) if sizes else DASH,
        megabytes(max(sizes)) if sizes else DASH,
        megabytes(log.wire_bytes),
        f"{record.saving(name):.0f}× fewer bytes",
        seconds(statistics.median(ages)) if ages else DASH,
        seconds(log.status.get("pause")),
        "yes" if same else "no",
    ]


def _legend(record: Record) -> str:
    chips = "".join(
        f'<span><span class="dot" style="background:var(--s{COLOURS.get(name, 3)})"></span>'
        f"{html.escape(name)}: {html.escape(log.role)}</span>"
        for name, log in record.followers.items()
    )
    return f'<div class="legend">{chips}</div>'


def _texts(record: Record) -> str:
    found = [
        [f"step {t['step']}", " ".join(t["text"].split())]
        for log in record.followers.values()
        for t in log.texts
    ]
    items = "".join(
        f"<tr><td>{html.escape(step)}</td><td>{html.escape(text)}</td></tr>" for step, text in found
    )
    prompt = f"<p>{html.escape(' '.join(record.plan['prompt'].split()))} …</p>"
    return f"{prompt}<details open><summary>{len(found)} texts</summary><table>{items}</table></details>"


def age_figure(record: Record) -> str:
    """Draw the age of what each follower holds against time."""
    figure, axes = new_figure(5.6, 3.3)
    for name, log in record.followers.items():
        if len(log.cut) == 2:
            axes.axvspan(*log.cut, color=RULE, alpha=0.5)
        xs, ys = record.ages(name)
        if xs:
            axes.plot(xs, ys, color=f"#0102{COLOURS.get(name, 3):02x}", linewidth=1.4)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds of training", color=FAINT, fontsize=9.5)
    axes.set_ylabel("age, s", color=FAINT, fontsize=9.5)
    return svg(figure, "age", "Age of the version each follower holds, against time")


def _points(record: Record, name: str, y_of: str, y_label: str, label: str) -> str:
    figure, axes = new_figure(5.6, 3.3)
    for who, log in record.followers.items():
        values = [a["nbytes"] / 1e6 if y_of == "nbytes" else record.ratio(a["nbytes"]) for a in log.arrivals]
        if values:
            curve(axes, [a["version"] for a in log.arrivals], values, COLOURS.get(who, 3))
    logarithmic(axes.yaxis)
    axes.set_xlabel("version", color=FAINT, fontsize=9.5)
    axes.set_ylabel(y_label, color=FAINT, fontsize=9.5)
    return svg(figure, name, label)


def bytes_figure(record: Record) -> str:
    """Draw the bytes of each patch, on a logarithmic axis."""
    return _points(record, "bytes", "nbytes", "MB (logarithmic)", "Bytes of each patch")


def ratio_figure(record: Record) -> str:
    """Draw how many times smaller than the whole state each patch was."""
    return _points(record, "ratio", "ratio", "times (logarithmic)", "Times smaller than the whole state")


def moved_figure(record: Record) -> str:
    """Draw the share of weights that each version changed."""
    figure, axes = new_figure(5.6, 3.3)
    numel = record.numel or 1
    curve(axes, [v["version"] for v in record.published],
          [100 * v["changed"] / numel for v in record.published], 0)  # fmt: skip
    logarithmic(axes.yaxis)
    axes.set_xlabel("version", color=FAINT, fontsize=9.5)
    axes.set_ylabel("% of weights (logarithmic)", color=FAINT, fontsize=9.5)
    return svg(figure, "moved", "Share of weights that each version changed")
