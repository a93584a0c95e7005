"""What the report's figures share: inline SVG in CSS variables, which follows light and dark themes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from thinwire.runs.records.finished_runs import Run
from thinwire.types import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

Runs = Sequence[Run[Any]]
Points = Iterable[tuple[float, float]]
WIDTH = 5.6  # inches of a figure
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


def series_order(runs: Runs) -> list[int]:
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


def new_axes(width: float, height: float) -> Axes:
    """Return the axes of a figure of so many inches; ``MissingExtra`` without matplotlib."""
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
    return axes


def svg(axes: Axes, name: str, label: str) -> str:
    """Return the figure of ``axes`` as SVG for a page; ``name`` keeps its ids apart from other figures'."""
    import matplotlib as mpl

    figure: Any = axes.figure
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(xmlns(:\w+)?)="[^"]*"', "", text)
    text = re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", text)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    for colour, variable in variables().items():
        text = text.replace(colour, f"var({variable})")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


class Curve(NamedTuple):
    """One curve of a figure: the number of its colour, its points, and its line style."""

    number: int
    points: Points
    style: str = STYLES[0]


def by_run(runs: Runs, of: Callable[[Run[Any]], Iterable[Points]]) -> list[Curve]:
    """Return the curves ``of`` each run, in its colour; the second and third in other line styles."""
    return [
        Curve(number, points, style)
        for run, number in zip(runs, series_order(runs), strict=True)
        for points, style in zip(of(run), STYLES * 4, strict=False)
    ]


def lines(
    name: str,
    title: str,
    curves: Iterable[Curve],
    x: str,
    y: str = "",
    log: str = "",
    how: str = "",
    base: int = 10,
) -> str:
    """Return curves as SVG. ``log``: the axis, ``x`` or ``y``, that is logarithmic, to a ``base``.

    ``how``: one of matplotlib's draw styles, for a low figure of plain lines; else as ``curve`` does.
    """
    axes = new_axes(WIDTH, 2.6 if how else 3.3)
    for number, points, style in curves:
        xs, ys = zip(*points, strict=True) if (points := list(points)) else ((), ())
        if how:
            axes.plot(xs, ys, style, drawstyle=how, color=series_colour(number), linewidth=1.6)
        else:
            curve(axes, xs, ys, number)
    if log == "y":
        logarithmic(axes.yaxis, base)
    elif not how:
        ticks(axes, log == "x")
    return labelled(axes, name, title, x, y)


def labelled(axes: Axes, name: str, title: str, x: str, y: str = "") -> str:
    """Return a figure as SVG, with its axes' labels; ``title`` is for readers who cannot see it."""
    axes.set_xlabel(x, color=FAINT, fontsize=9.5)
    axes.set_ylabel(y, color=FAINT, fontsize=9.5)
    return svg(axes, name, title)


def curve(axes: Axes, x: Sequence[float], y: Sequence[float], number: int) -> None:
    """Draw one run's curve; of many points also the running mean."""
    look: dict[str, Any] = {
        "color": series_colour(number),
        "linestyle": STYLES[number // SERIES % len(STYLES)],
        "linewidth": 2.4 if number == 1 else 1.7,
        "zorder": 3 if number == 1 else 2,
    }
    if len(y) > WINDOW:
        axes.plot(x, y, **(look | {"linewidth": 0.7, "alpha": 0.3}))
        y = smooth(y, max(5, len(y) // 30))
    marker: dict[str, Any] = {"marker": "o", "markersize": 3.2} if len(y) <= WINDOW else {}
    axes.plot(x, y, **look, **marker)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to ``window - 1`` before it."""
    return [
        sum(part) / len(part) for i in range(len(values)) for part in [values[max(0, i - window + 1) : i + 1]]
    ]


def ticks(axes: Axes, log: bool) -> None:
    """Number the x axis plainly, on a logarithmic one at 1, 2 and 5."""
    from matplotlib.ticker import MaxNLocator

    if log:
        logarithmic(axes.xaxis)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def logarithmic(axis: Axis, base: int = 10) -> None:
    """Give an axis a logarithmic scale with plain numbers, of decades at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes = axis.axes
    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    subs = (1.0, 2.0, 5.0) if base == 10 else (1.0,)
    axis.set_major_locator(LogLocator(base=base, subs=subs, numticks=12))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
