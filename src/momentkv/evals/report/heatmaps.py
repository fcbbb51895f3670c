"""Needle-in-a-haystack scores by depth and length, one small map per variant."""

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from momentkv.evals.figures import family_of
from momentkv.evals.report.layout import name_of
from momentkv.evals.report.runs import View
from momentkv.evals.results import Entry

# From no to every answer right: the lightness rises evenly, so that it reads without colour too.
_STOPS = ((38, 20, 76), (94, 44, 122), (176, 64, 108), (231, 122, 82), (247, 214, 138))


@dataclass(frozen=True)
class Cell:
    """text: the mean score, 0 to 100, or "" where there is no sample. title: with the number of samples."""

    text: str
    title: str
    background: str
    ink: str


@dataclass(frozen=True)
class HeatMap:
    """cells: a row per depth, a column per length."""

    name: str
    level: str
    lengths: list[str]
    depths: list[str]
    cells: list[list[Cell]]


def _colour(share: float) -> tuple[str, str]:
    """Background and ink for a score from 0 to 1."""
    place = min(max(share, 0.0), 1.0) * (len(_STOPS) - 1)
    i = min(int(place), len(_STOPS) - 2)
    rgb = [round(a + (place - i) * (b - a)) for a, b in zip(_STOPS[i], _STOPS[i + 1], strict=True)]
    light = (0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]) / 255
    return f"#{rgb[0]:02x}{rgb[1]:02x}{rgb[2]:02x}", "#000" if light > 0.5 else "#fff"


def _cell(scores: list[float]) -> Cell:
    if not scores:
        return Cell("", "no sample", "transparent", "inherit")
    score = fmean(scores)
    return Cell(f"{100 * score:.0f}", f"n = {len(scores)}", *_colour(score))


def _number(facts: Any, name: str) -> float | None:
    value = facts.get(name) if isinstance(facts, dict) else None
    return float(value) if isinstance(value, int | float) else None


def heat_maps(view: View) -> list[HeatMap]:
    """Of every variant, the full cache first, then by level; over all needle tasks that the view shows."""
    shown = {o["task"] for o in view.objects}
    scores: dict[Entry, dict[tuple[float, float], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in view.results.rows:
        if (
            family_of(row["task"]) != "niah"
            or row["protocol"] != view.protocol
            or not {row["task"], "niah/avg"} & shown
        ):
            continue
        length, depth = _number(row.get("facts"), "length"), _number(row.get("facts"), "depth")
        values = [v for v in row["values"].values() if isinstance(v, int | float)]
        if length is not None and depth is not None and values:
            scores[row["entry"]][length, depth].append(values[0])
    places = {place for by_place in scores.values() for place in by_place}
    lengths, depths = sorted({length for length, _ in places}), sorted({depth for _, depth in places})
    levels = list(dict.fromkeys(entry.level for entry in scores))
    return [
        HeatMap(
            name_of(entry._asdict()),
            entry.level,
            [f"{length:,.0f}" for length in lengths],
            [f"{depth:.0%}" for depth in depths],
            [[_cell(scores[entry][length, depth]) for length in lengths] for depth in depths],
        )
        for entry in sorted(scores, key=lambda e: (e.group > 0, levels.index(e.level), e.group))
    ]
