"""A report as one HTML page that needs nothing else: charts, tables to sort, heat maps, the run's specification."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from momentkv.evals.averages import AVERAGED
from momentkv.evals.report import charts, layout
from momentkv.evals.report.heatmaps import heat_maps
from momentkv.evals.report.runs import View
from momentkv.evals.report.tables import EQUAL_BYTES, HEADINGS, cells_of
from momentkv.evals.variants import FULL

SHOWN_ERRORS = 200
SHOWN_TEXT = 400  # characters of a prediction or an answer


@dataclass(frozen=True)
class Example:
    """One sample of a task, and what every variant made of it."""

    task: str
    sample: str
    answers: str
    predictions: list[tuple[str, str, str]]  # variant, score, text


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= SHOWN_TEXT else text[:SHOWN_TEXT] + "…"


def examples(view: View) -> list[Example]:
    """The first sample of every task that asks for text."""
    shown = {o["task"] for o in view.objects}
    first: dict[str, list[dict[str, Any]]] = {}
    for row in view.results.rows:
        if row["task"] in shown and row["protocol"] == view.protocol and isinstance(row.get("pred"), str):
            mine = first.setdefault(row["task"], [])
            if not mine or mine[0]["sample"] == row["sample"]:
                mine.append(row)
    levels = [FULL, *dict.fromkeys(row["level"] for rows in first.values() for row in rows if row["level"] != FULL)]
    return [
        Example(
            task,
            rows[0]["sample"],
            _cut(" | ".join(map(str, rows[0].get("answers") or ()))),
            [
                (row["entry"].label, ", ".join(f"{100 * v:.0f}" for v in row["values"].values()), _cut(row["pred"]))
                for row in sorted(rows, key=lambda row: (levels.index(row["entry"].level), row["entry"].group))
            ],
        )
        for task, rows in first.items()
    ]


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list) and all(isinstance(x, str | int | float) for x in value):
        yield name, ", ".join(map(str, value))
    else:
        yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _family_charts(tables: Sequence[layout.Table], tasks: set[str]) -> list[charts.Chart]:
    """Of the averages, the headline first; of the tasks where there are none.

    Args:
        tasks: those that are no averages.
    """
    by_figure: dict[tuple[str, str], list[layout.Table]] = {}
    for table in tables:
        by_figure.setdefault((table.task, table.metric), []).append(table)
    averages = [figure for figure in by_figure if figure[0] not in tasks and tables[0].family in AVERAGED]
    chosen = averages or [figure for figure in by_figure if figure[0] in tasks]
    chosen.sort(key=lambda figure: not figure[0].endswith("/avg"))
    return [chart for figure in chosen if (chart := charts.chart_of(by_figure[figure])) is not None]


def _family(family: str, tables: list[layout.Table], tasks: set[str]) -> dict[str, Any]:
    groups = layout.grouped(tables)
    return {
        "name": family,
        "charts": _family_charts(tables, tasks),
        "levels": [
            {
                "level": level,
                "headlines": layout.headlines(mine),
                "matrices": layout.matrices(mine),
                "tables": mine,
                "tasks": list(dict.fromkeys(table.task for table in mine)),
            }
            for (_, level), mine in groups.items()
        ],
    }


def _section(view: View) -> dict[str, Any]:
    tables = layout.all_tables(view)
    tasks = {row["task"] for row in view.results.rows}
    families = {table.family: [t for t in tables if t.family == table.family] for table in tables}
    return {
        "view": view,
        "families": [_family(name, mine, tasks) for name, mine in families.items()],
        "maps": heat_maps(view),
        "spec": list(_flat("", view.results.spec)),
        "errors": view.errors[:SHOWN_ERRORS],
        "more_errors": max(0, len(view.errors) - SHOWN_ERRORS),
        "examples": examples(view),
    }


def html_text(views: Sequence[View]) -> str:
    """The page. All text of rows, errors and specifications is escaped."""
    here = files("momentkv.evals.report")

    def source(name: str) -> str:
        return here.joinpath(name).read_text(encoding="utf-8")

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(source)
    )
    page = environment.get_template("template.html.jinja").render(
        sections=[_section(view) for view in views],
        style=Markup(source("report.css")),
        script=Markup(source("report.js")),
        headings=HEADINGS,
        cells_of=cells_of,
        short_name=layout.short_name,
        equal_bytes=EQUAL_BYTES,
        entry_of=layout.entry_of,
        count_of=layout.count_of,
        frame=charts,
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # predictions may hold half of a surrogate pair
