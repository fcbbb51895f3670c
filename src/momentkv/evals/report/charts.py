"""Score against bytes, laid out for inline SVG: positions in pixels, ticks and markers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from momentkv.evals.figures import is_score
from momentkv.evals.report.layout import MIB, Table, entry_of, name_of

WIDTH, HEIGHT = 800, 400
LEFT, RIGHT, TOP, BOTTOM = 72, 790, 10, 356  # the plot's frame
GAP = 9.0  # pixels between neighbours
MARKERS = 12  # shapes that the template draws
COLOURS = 10  # that the style sheet has
DASHES = 3
KINDS = ("full", "anchor", "plain", "bytes", "corrected")  # by `Entry.group`: how lines and markers are drawn


@dataclass(frozen=True)
class Point:
    """A value with its interval, in pixels, and what a tooltip says."""

    x: float
    y: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Series:
    """One method over all levels. dash: tells equal-bytes lines of one method apart, by whose bytes they have."""

    name: str
    kind: str
    marker: int
    colour: int
    dash: int
    points: list[Point]


@dataclass(frozen=True)
class Chart:
    """full: height of the full cache's line, None where it is off the axis, and its text; None without a full cache.
    Ticks are (pixel, label)."""

    title: str
    label: str
    series: list[Series]
    full: tuple[float | None, str] | None
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


@dataclass(frozen=True)
class Scale:
    """From figures to pixels. ends: (figure, pixel) twice."""

    ends: tuple[tuple[float, float], tuple[float, float]]
    log: bool

    def __call__(self, value: float) -> float:
        """The pixel of a figure; what a logarithm cannot show is at the first end."""
        (a, start), (b, stop) = self.ends
        if self.log:
            value, a, b = math.log(max(value, a)), math.log(a), math.log(b)
        return round(start + (value - a) / (b - a) * (stop - start), 1)

    def ticks(self, least: int = 4) -> list[tuple[float, str]]:
        """Round figures between the ends, `least` or more where there are so many."""
        low, high = self.ends[0][0], self.ends[1][0]
        found = _log_ticks(low, high, least) if self.log else _even_ticks(low, high, least)
        return [(self(t), f"{t:.6g}") for t in found]


def _even_ticks(low: float, high: float, least: int) -> list[float]:
    step = 10.0 ** math.floor(math.log10((high - low) / least))
    step *= max((m for m in (1, 2, 5) if (high - low) / (m * step) >= least), default=1)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, least: int) -> list[float]:
    found: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [float(f"{d * 10.0**p:.6g}") for p in powers for d in digits if low <= d * 10.0**p <= high]
        if len(found) >= least:
            return found
    return found if len(found) > 1 else _even_ticks(low, high, least)


def spread(wanted: Sequence[float], low: float, high: float, gap: float = GAP) -> list[float]:
    """Positions near the wanted ones, in the same order, with at least `gap` between neighbours, within the ends."""
    gap = min(gap, (high - low) / max(1, len(wanted)))
    blocks: list[list[int]] = []
    middles: list[float] = []
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        blocks.append([i])
        middles.append(wanted[i])
        while True:
            half = gap * (len(blocks[-1]) - 1) / 2
            middles[-1] = min(max(middles[-1], low + half), high - half)
            if len(blocks) == 1 or middles[-1] - middles[-2] >= gap * (len(blocks[-1]) + len(blocks[-2])) / 2:
                break
            last, mean = blocks.pop(), middles.pop()
            both = len(last) + len(blocks[-1])
            middles[-1] = (middles[-1] * len(blocks[-1]) + mean * len(last)) / both
            blocks[-1] += last
    placed = [0.0] * len(wanted)
    for block, middle in zip(blocks, middles, strict=True):
        for j, i in enumerate(block):
            placed[i] = round(middle + gap * (j - (len(block) - 1) / 2), 1)
    return placed


def _ends(o: dict[str, Any]) -> tuple[float, float]:
    return (o["value"], o["value"]) if o["ci_low"] is None else (o["ci_low"], o["ci_high"])


def _scales(objects: list[dict[str, Any]], full: list[dict[str, Any]], score: bool) -> tuple[Scale, Scale]:
    sizes = [o["bytes"] / MIB for o in objects]
    low, high = min(sizes), max(sizes)
    if high <= low * 1.1:
        low, high = low / 1.5, high * 1.5
    x = Scale(((low, LEFT + 60), (high, RIGHT - 60)), True)
    values = [v for o in objects for v in _ends(o)]
    log = not score and min(values) > 0 and max(values) > 8 * min(values)
    if not log:  # a full cache that is nearly at zero would take up all of a logarithmic axis
        values += [v for o in full for v in _ends(o)]
    bottom, top = min(values), max(values)
    pad = (top - bottom) * 0.06 or abs(top) * 0.1 or 1.0
    ends = (bottom / 1.15, top * 1.15) if log else (bottom - pad, top + pad)
    return x, Scale(((ends[0], BOTTOM), (ends[1], TOP)), log)


def chart_of(tables: Sequence[Table]) -> Chart | None:
    """The chart of one task (or average) and metric; None where no compressed cache has a value.

    Args:
        tables: of all levels.
    """
    first = tables[0]
    objects = [o for table in tables for o in table.objects if o["level"] == table.level and entry_of(o).group]
    full = [o for o in first.objects if entry_of(o).group == 0]
    if not objects:
        return None
    x, y = _scales(objects, full, is_score(first.task))
    places = spread([x(o["bytes"] / MIB) for o in objects], LEFT + 6, RIGHT - 6)
    methods = list(dict.fromkeys((o["method"], o["preset"]) for o in objects))
    matched = list(dict.fromkeys(o["matched"] for o in objects if o["match"] == "bytes"))
    series: dict[tuple, Series] = {}
    for o, place in sorted(zip(objects, places, strict=True), key=lambda pair: pair[0]["bytes"]):
        entry, index = entry_of(o), methods.index((o["method"], o["preset"]))
        key = (entry.group, entry.name, name_of(o))
        if key not in series:
            series[key] = Series(
                name_of(o),
                KINDS[entry.group],
                index % MARKERS,
                index % COLOURS,
                matched.index(entry.matched) % DASHES if entry.match == "bytes" else 0,
                [],
            )
        low, high = _ends(o)
        text = f"{name_of(o)}, budget {o['level']}: {first.value(o)} at {o['bytes'] / MIB:.2f} MiB, n = {o['n']}"
        series[key].points.append(Point(place, y(o["value"]), y(low), y(high), text))
    line: tuple[float | None, str] | None = None
    if full:
        shown = y.ends[0][0] <= full[0]["value"] <= y.ends[1][0]
        text = f"full cache: {first.value(full[0])} at {full[0]['bytes'] / MIB:.1f} MiB"
        line = (y(full[0]["value"]), text) if shown else (None, f"{text} (off the axis)")
    ordered = [series[key] for key in sorted(series, key=lambda key: key[0])]
    return Chart(f"{first.task}, {first.metric}", f"{first.metric} {first.arrow}", ordered, line, _inside(x), y.ticks())


def _inside(x: Scale) -> list[tuple[float, str]]:
    return [(place, label) for place, label in x.ticks() if LEFT <= place <= RIGHT]
