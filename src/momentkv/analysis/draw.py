"""Drawing with matplotlib: panels of lines, and one head's values in a plane. Readable without colours."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# Colours of different lightness that colour-blind readers can tell apart; markers and dashes say the same.
COLOURS = ("#000000", "#d55e00", "#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "svg.hashsalt": "momentkv",  # the same figure gives the same file
}
INCHES = 3.5  # of a panel's side

Point = tuple[float, float]
Arrows = dict[str, Point]  # tips by name


@dataclass(frozen=True)
class Line:
    """x, y: its points. low, high: around each, or None. bars: they are intervals and drawn so, not as a band.
    style: which marker, colour and dash; those of a line without `joined` points have no dash."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    bars: bool = False
    style: int = 0
    joined: bool = True


@dataclass(frozen=True)
class Panel:
    """One pair of axes. log: x is logarithmic. ticks: x values that are named, default matplotlib's. flat: heights
    of dotted lines across, with what they are. zero: y begins at 0."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log: bool = False
    ticks: Sequence[tuple[float, str]] = ()
    flat: Sequence[tuple[float, str]] = ()
    zero: bool = False


def _line(axes: Any, line: Line, marks: bool) -> None:
    colour = COLOURS[line.style % len(COLOURS)]
    look = {
        "color": colour,
        "linestyle": DASHES[line.style % len(DASHES)] if line.joined else "none",
        "marker": MARKERS[line.style % len(MARKERS)] if marks else None,
        "markersize": 4,
        "linewidth": 1.4,
        "label": line.name,
    }
    if line.bars and line.low is not None and line.high is not None:
        below = [y - low for y, low in zip(line.y, line.low, strict=True)]
        above = [high - y for y, high in zip(line.y, line.high, strict=True)]
        axes.errorbar(line.x, line.y, yerr=[below, above], capsize=2, elinewidth=0.8, **look)
        return
    axes.plot(line.x, line.y, **look)
    if line.low is not None and line.high is not None:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)


def _panel(axes: Any, panel: Panel, legend: bool) -> None:
    marks = len(panel.lines) > 1 or max(len(line.x) for line in panel.lines) < 12
    for line in panel.lines:
        _line(axes, line, marks)
    for height, name in panel.flat:
        axes.axhline(height, color="black", linewidth=0.8, linestyle=(0, (1, 3)), label=name or None)
    if panel.log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    if panel.ticks:
        axes.set_xticks([x for x, _ in panel.ticks], [name for _, name in panel.ticks])
        axes.minorticks_off()
    if panel.zero:
        axes.set_ylim(bottom=0)
    axes.set_title(panel.title, loc="left", fontsize=9.5)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if legend and (len(panel.lines) > 1 or any(name for _, name in panel.flat)):
        axes.legend(fontsize=7.5, framealpha=0.7)


def _save(figure: Figure, stem: Path, caption: str) -> list[Path]:
    """Write `stem` as SVG and PNG with the caption below the axes."""
    width = figure.get_figwidth()
    text = "\n".join(textwrap.wrap(caption, int(14.5 * width)))
    inches = 0.17 * (text.count("\n") + 1) + 0.1
    figure.set_figheight(figure.get_figheight() + inches)
    share = inches / figure.get_figheight()
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0, share, 1, 1 - share))
    figure.text(0.01, share - 0.02 / figure.get_figheight(), text, fontsize=8.5, va="top", ha="left")
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png")]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def panels(stem: Path, grid: Sequence[Sequence[Panel]], caption: str, shared: bool = False) -> list[Path]:
    """Draw rows of panels of equal number into `stem`.svg and `stem`.png; the paths are returned.

    Args:
        shared: all panels have the lines of the first, and one legend beside them. Default False: each has its own.
    """
    with matplotlib.rc_context(STYLE):
        rows, columns = len(grid), len(grid[0])
        figure = Figure(figsize=(INCHES * 1.15 * columns, INCHES * 0.85 * rows), layout="constrained")
        places = figure.subplots(rows, columns, squeeze=False)
        for axes, panel in zip(places.flat, (panel for row in grid for panel in row), strict=True):
            _panel(axes, panel, not shared)
        if shared:
            figure.set_figwidth(figure.get_figwidth() + 1.6)
            figure.legend(*places[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
        return _save(figure, stem, caption)


def _arrows(axes: Any, arrows: Arrows, start: Point) -> None:
    """The first drawn widest, so that those below one another are seen."""
    for i, (name, tip) in enumerate(arrows.items()):
        look = {"color": COLOURS[(0, 1, 2)[i]], "linestyle": DASHES[i], "linewidth": (3.0, 2.0, 1.3)[i]}
        head = look | {"arrowstyle": "-|>", "mutation_scale": 12, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", tip, start, arrowprops=head, zorder=4 + i)
        axes.plot([], [], label=name, **look)
    axes.plot(*start, "k+", markersize=9, label="zero vector", zorder=9)


def _square(axes: Any, points: Sequence[Point]) -> tuple[Point, float]:
    """Limit the axes to a square with these points well inside it; its lower left corner and side are returned."""
    (left, right), (low, high) = ((min(side), max(side)) for side in zip(*points, strict=True))
    side = 1.5 * max(right - left, high - low, 1e-6)
    corner = ((left + right - side) / 2, (low + high - side) / 2)
    axes.set(xlim=(corner[0], corner[0] + side), ylim=(corner[1], corner[1] + side))
    axes.set_aspect("equal")
    return corner, side


def _dots(axes: Any, values: Any, retained: Any) -> None:
    lost, kept = values[~retained], values[retained]
    axes.plot(*lost.T, ".", color="#aaaaaa", markersize=2.5, label=f"evicted, {len(lost):,}", rasterized=True)
    look = {"color": "none", "markeredgecolor": "#cc79a7", "markersize": 5, "zorder": 2}
    axes.plot(*kept.T, "^", label=f"retained, {len(kept):,}", **look)


def head(
    stem: Path,
    values: Any,
    retained: Any,
    arrows: Arrows,
    zero: Point,
    labels: tuple[str, str],
    exact: Arrows,
    note: str,
    caption: str,
) -> list[Path]:
    """Draw one head's values, its outputs among them and the outputs alone; paths as `panels`.

    Args:
        values: `[n, 2]`. retained: which of them, `[n]`. arrows: tips by name. zero: where they start.
        labels: of the axes that these have. exact: tips in the outputs' own plane, from (0, 0). note: its title.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.3 * INCHES, 1.15 * INCHES), layout="constrained")
        whole, near, own = figure.subplots(1, 3)
        for axes in (whole, near):
            _dots(axes, values, retained)
            axes.set(xlabel=labels[0], ylabel=labels[1])
        _arrows(near, arrows, zero)
        corner, side = _square(near, [zero, *arrows.values()])
        whole.add_patch(Rectangle(corner, side, side, fill=False, linewidth=1.2, zorder=5, label="enlarged in (b)"))
        whole.set_aspect("equal", adjustable="datalim")
        _arrows(own, exact, (0.0, 0.0))
        _square(own, [(0.0, 0.0), *exact.values()])
        own.set(xlabel="along $f_R$", ylabel="across $f_R$, where $f_E$ is")
        for axes, title in ((whole, "(a) values"), (near, "(b) values and outputs"), (own, f"(c) {note}")):
            axes.set_title(title, fontsize=9, loc="left")
        for axes in (whole, own):
            axes.legend(fontsize=7.5, framealpha=0.8)
        return _save(figure, stem, caption)
