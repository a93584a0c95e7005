"""The report's figures: inline SVG whose colours are CSS variables, so it follows light and dark themes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from thinwire.lab.progress import megabytes
from thinwire.lab.runs import Run
from thinwire.types import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = 8  # colours of the stylesheet; later runs start over with another line style
STYLES = ("-", "--", ":")
PARTS = ("compute", "encode", "decode", "wait", "other")
WINDOW = 60  # above so many steps the raw losses are drawn faintly, under their running mean

# Stand-ins that matplotlib can draw with; each becomes a CSS variable in the SVG.
INK, FAINT, RULE = "#010101", "#010102", "#010103"
SURFACE = "#010104"


def series_colour(i: int) -> str:
    """Return the stand-in of run ``i``'s colour."""
    return f"#0102{i % SERIES:02x}"


def part_colour(i: int) -> str:
    """Return the stand-in of a step's part."""
    return f"#0103{i:02x}"


def variables() -> dict[str, str]:
    """Return stand-in colour -> CSS variable."""
    names = {INK: "--ink", FAINT: "--muted", RULE: "--rule", SURFACE: "--card"}
    names |= {series_colour(i): f"--s{i}" for i in range(SERIES)}
    return names | {part_colour(i): f"--p{i}" for i in range(len(PARTS))}


def series_order(runs: Sequence[Run]) -> list[int]:
    """Return each run's colour number: fp32 is the grey 0, thinwire the accent 1, the rest follow."""
    fixed = {"fp32": 0, "thinwire": 1}
    free = iter(range(2, 2 + len(runs)))
    taken: set[int] = set()
    order = []
    for run in runs:
        number = fixed.get(run.record.recipe.name)
        if number is None or number in taken:
            number = next(free)
        taken.add(number)
        order.append(number)
    return order


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingExtra(
            "the report needs matplotlib, which is not installed; pip install 'thinwire[cli]'"
        ) from e
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(RULE)
    axes.tick_params(colors=FAINT, labelsize=9, length=3, which="both")
    axes.grid(True, color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure, name: str, label: str) -> str:
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?)="[^"]*"', "", svg)
    svg = re.sub(r'\s(width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    for colour, variable in variables().items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _curve(axes: Axes, x: Sequence[float], y: Sequence[float], number: int) -> None:
    look: dict[str, Any] = {
        "color": series_colour(number),
        "linestyle": STYLES[number // SERIES % len(STYLES)],
        "linewidth": 2.4 if number == 1 else 1.7,
        "zorder": 3 if number == 1 else 2,
    }
    if len(y) > WINDOW:
        axes.plot(x, y, **(look | {"linewidth": 0.7, "alpha": 0.3}))
        y = _smooth(y, max(5, len(y) // 30))
    marker: dict[str, Any] = {"marker": "o", "markersize": 3.2} if len(y) <= WINDOW else {}
    axes.plot(x, y, **look, **marker)


def _smooth(values: Sequence[float], window: int) -> list[float]:
    return [
        sum(part) / len(part) for i in range(len(values)) for part in [values[max(0, i - window + 1) : i + 1]]
    ]


def _loss_plot(
    runs: Sequence[Run], name: str, x_label: str, x_of: Callable[[Run], list[float]], log: bool
) -> str:
    figure, axes = _figure(5.6, 3.3)
    for run, number in zip(runs, series_order(runs), strict=True):
        y = run.record.loss.train
        x = x_of(run)[: len(y)]
        _curve(axes, x, y[: len(x)], number)
    _ticks(axes, log)
    axes.set_xlabel(x_label, color=FAINT, fontsize=9.5)
    axes.set_ylabel("training loss, nats a token", color=FAINT, fontsize=9.5)
    return _svg(figure, name, f"Training loss against {x_label}, one curve a recipe")


def _ticks(axes: Axes, log: bool) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    if not log:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def loss_by_step(runs: Sequence[Run]) -> str:
    """Draw the training loss against optimiser steps."""
    return _loss_plot(
        runs, "steps", "steps", lambda r: [i + 1.0 for i in range(len(r.record.loss.train))], False
    )


def loss_by_seconds(runs: Sequence[Run]) -> str:
    """Draw the training loss against seconds of training."""
    return _loss_plot(
        runs,
        "seconds",
        "seconds of training",
        lambda r: list(accumulate(m.seconds for m in r.metrics)),
        False,
    )


def loss_by_bytes(runs: Sequence[Run]) -> str:
    """Draw the training loss against bytes sent, on a logarithmic axis."""
    return _loss_plot(
        runs,
        "bytes",
        "megabytes sent (logarithmic)",
        lambda r: [b / 1e6 for b in accumulate(m.bytes_forward + m.bytes_backward for m in r.metrics)],
        True,
    )


def step_parts(run: Run) -> list[float]:
    """Return mean seconds of a step in compute, encode, decode, wait and the rest."""
    n = max(1, len(run.metrics))
    parts = [
        sum(getattr(m, f"{part}_s") for m in run.metrics) / n
        for part in ("compute", "encode", "decode", "wait")
    ]
    return [*parts, max(0.0, sum(m.seconds for m in run.metrics) / n - sum(parts))]


def step_time(runs: Sequence[Run]) -> str:
    """Draw where a step's time goes: one stacked bar a run."""
    figure, axes = _figure(5.6, 0.75 + 0.5 * len(runs))
    rows = [step_parts(run) for run in runs]
    left = [0.0] * len(runs)
    for i in range(len(PARTS)):
        widths = [row[i] for row in rows]
        axes.barh(range(len(runs)), widths, left=left, height=0.58, color=part_colour(i))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, total in enumerate(left):
        axes.annotate(f"{total:.2f} s", (total, y), (4, 0), textcoords="offset points", va="center",
                      color=INK, fontsize=9)  # fmt: skip
    _name_bars(axes, [run.label for run in runs], max(left, default=1.0))
    axes.set_xlabel("seconds a step, mean over steps and ranks", color=FAINT, fontsize=9.5)
    return _svg(figure, "time", "Where the time of a step goes, one bar a recipe")


def boundary_bytes(runs: Sequence[Run]) -> str:
    """Draw the bytes over each stage boundary and direction: two bars a boundary and run."""
    order = series_order(runs)
    labels: list[str] = []
    bars: list[tuple[float, str, float]] = []
    for run, number in zip(runs, order, strict=True):
        for b in sorted(run.record.bytes.by_boundary, key=lambda b: (b.boundary, b.direction != "forward")):
            arrow = "→" if b.direction == "forward" else "←"
            labels.append(f"{run.label}  {b.boundary.replace('-', arrow)}")
            bars.append((float(b.bytes), series_colour(number), 1.0 if b.direction == "forward" else 0.55))
    figure, axes = _figure(5.6, 0.75 + 0.3 * max(1, len(bars)))
    for y, (width, colour, alpha) in enumerate(bars):
        axes.barh(y, width / 1e6, height=0.7, color=colour, alpha=alpha)
        axes.annotate(megabytes(width), (width / 1e6, y), (4, 0), textcoords="offset points", va="center",
                      color=INK, fontsize=9)  # fmt: skip
    _name_bars(axes, labels, max((b[0] for b in bars), default=1e6) / 1e6)
    axes.set_xlabel("megabytes sent over the run (→ forward, ← backward)", color=FAINT, fontsize=9.5)
    return _svg(figure, "boundaries", "Bytes by stage boundary and direction")


def _name_bars(axes: Axes, labels: Sequence[str], longest: float) -> None:
    axes.set_yticks(range(len(labels)), [text.replace("$", r"\$") for text in labels])
    axes.tick_params(axis="y", labelcolor=INK, length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, (longest or 1.0) * 1.16)
    axes.grid(False, axis="y")
