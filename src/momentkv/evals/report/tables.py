"""A report as text: tables for the terminal, one CSV file of everything, and tables for LaTeX."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from momentkv.evals.report.layout import (
    MIB,
    Matrix,
    Table,
    all_tables,
    budget_of,
    count_of,
    entry_of,
    grouped,
    headlines,
    matrices,
    short_name,
)
from momentkv.evals.report.runs import View

HEADINGS = ("method", "budget", "tokens\n/ head", "MiB\nheld", "sum-\nmary", "te", "peak\nMiB")
EQUAL_BYTES = "A method with a size in its name was given the bytes of a corrected one's summary as more exact tokens."
WIDTH = 120  # of a file or a pipe, which has no width of its own


def cells_of(table: Table, o: dict[str, Any]) -> list[str]:
    """The cells of a line: those of `HEADINGS`, then value, difference, baseline and n."""
    return [
        short_name(o),
        budget_of(o),
        f"{o['tokens_per_head']:.0f}",
        f"{o['bytes'] / MIB:.2f}",
        f"{o['summary_bytes'] / MIB:.2f}",
        f"{o['token_equivalents']:.0f}",
        f"{o['peak_bytes'] / MIB:.1f}",
        table.value(o),
        table.difference(o),
        table.baseline(o),
        count_of(o),
    ]


def _wrapped(label: str) -> str:
    """A column's label with line breaks at underscores, so that columns stay as narrow as their figures."""
    return label.replace("_", "_\n") if len(label) > 6 else label


def rich_table(table: Table) -> RichTable:
    """With intervals, for the terminal."""
    made = RichTable(box=box.SIMPLE, padding=0, title=escape(title_of(table)), title_justify="left")
    made.add_column(HEADINGS[0], overflow="fold")
    for heading in HEADINGS[1:]:
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column(f"{escape(table.metric)} {table.arrow}\n[95 %]", justify="right", no_wrap=True)
    made.add_column("difference\n[95 %]", justify="right", no_wrap=True)
    made.add_column("to the\nstrongest plain", overflow="fold")
    made.add_column("n", justify="right", no_wrap=True)
    group = None
    for o in table.objects:
        if group not in (None, entry_of(o).group):
            made.add_section()
        group = entry_of(o).group
        cells = [escape(cell) for cell in cells_of(table, o)]
        if table.is_best(o):
            cells[0], cells[7] = (f"[bold]{cells[i]}[/bold]" for i in (0, 7))
        made.add_row(*cells)
    return made


def rich_matrices(matrix: Matrix, width: int) -> list[RichTable]:
    """Values alone, in as many tables as the width asks for."""
    first = 3 + max(len(short_name(o)) for o, _ in matrix.lines)
    columns = [
        2 + max(map(len, [*_wrapped(label).split("\n"), *(t.show(o["value"]) for o in t.objects)]))
        for label, t in zip(matrix.labels, matrix.tables, strict=True)
    ]
    parts: list[list[int]] = [[]]
    for i, size in enumerate(columns):
        if parts[-1] and first + sum(columns[j] for j in parts[-1]) + size > width:
            parts.append([])
        parts[-1].append(i)
    return [_rich_matrix(matrix, part) for part in parts]


def _rich_matrix(matrix: Matrix, part: list[int]) -> RichTable:
    made = RichTable("method", box=box.SIMPLE, padding=(0, 1, 0, 0), title=escape(matrix.title), title_justify="left")
    for i in part:
        made.add_column(escape(_wrapped(matrix.labels[i])), justify="right", no_wrap=True)
    for o, cells in matrix.lines:
        shown = []
        for table, cell in (cells[i] for i in part):
            text = table.show(cell["value"]) if cell else "-"
            shown.append(f"[bold]{text}[/bold]" if cell and table.is_best(cell) else text)
        made.add_row(escape(short_name(o)), *shown)
    return made


def title_of(table: Table) -> str:
    """Task and metric."""
    return f"{table.task}, {table.metric}"


def print_terminal(views: Sequence[View], console: Console, every: bool = False) -> None:
    """Print the tables of averages, the values of every task below them, and what is missing.

    Args:
        every: tables with intervals of everything, not only of the averages.
    """
    for view in views:
        console.rule(escape(f"{view.title} ({view.results.folder})"), align="left")
        for (family, level), tables in grouped(all_tables(view)).items():
            console.print(f"\n[bold]{escape(family)}, budget {escape(level)}[/bold]")
            for table in tables if every else headlines(tables):
                console.print(rich_table(table))
            for matrix in [] if every else matrices(tables):
                for made in rich_matrices(matrix, console.width):
                    console.print(made)
        if any(o["match"] == "bytes" for o in view.objects):
            console.print(EQUAL_BYTES, highlight=False)
        for remark in view.remarks:
            console.print(f"! {escape(remark)}", highlight=False)


def csv_text(views: Sequence[View]) -> str:
    """Every object of the summaries, with its run and the errors of its task."""
    lines = [
        {
            "run": str(view.results.folder),
            "model": view.model,
            **o,
            "errors": sum(str(e.get("task")) == o["task"] for e in view.errors),
        }
        for view in views
        for o in view.objects
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
