"""A table of the paper: its cells, and how it is shown on the terminal, in Markdown and as CSV."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from momentkv.evals.spec import write_atomically

WIDTH = 200  # of a file or a pipe, which has no width of its own


class Cell(NamedTuple):
    """A measured figure. low, high: its 95 % interval, where there is one. n: samples. sign: "+" for differences."""

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    sign: str = ""
    digits: int = 2

    def text(self, interval: bool) -> str:
        """`46.38`, with the interval `46.38 [45.10, 47.90]`."""
        if self.value is None:
            return "-"
        shown = f"{self.value:{self.sign}.{self.digits}f}"
        if not interval or self.low is None or self.high is None:
            return shown
        return f"{shown} [{self.low:{self.sign}.{self.digits}f}, {self.high:{self.sign}.{self.digits}f}]"


Value = Cell | str | int | float | None


@dataclass(frozen=True)
class PaperTable:
    """Lines of one table. rows: values by column; a column that a row lacks is empty. notes: what readers must know.

    intervals: columns that are shown with their intervals; CSV has those of all.
    """

    number: int
    title: str
    columns: tuple[str, ...]
    rows: list[dict[str, Value]]
    notes: tuple[str, ...]
    intervals: tuple[str, ...] = ()

    def text(self, column: str, row: dict[str, Value]) -> str:
        """A cell as the terminal and Markdown show it."""
        value = row.get(column)
        if isinstance(value, Cell):
            return value.text(column in self.intervals)
        if isinstance(value, int):
            return f"{value:,}"
        return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else value


def print_table(table: PaperTable) -> None:
    """To the terminal, notes below."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    made = RichTable(box=box.SIMPLE, padding=(0, 1, 0, 0), title=escape(table.title), title_justify="left")
    for column in table.columns:
        words = any(isinstance(row.get(column), str) for row in table.rows)
        made.add_column(escape(column), justify="left" if words else "right", overflow="fold")
    for row in table.rows:
        made.add_row(*(escape(table.text(column, row)) for column in table.columns))
    console.print(made)
    for remark in table.notes:
        console.print(f"* {escape(remark)}")


def markdown_text(table: PaperTable) -> str:
    """A Markdown table with its title and notes."""

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

    head = [f"## {table.title}", "", line(list(table.columns)), line(["---"] * len(table.columns))]
    body = [line([table.text(column, row) for column in table.columns]) for row in table.rows]
    return "\n".join([*head, *body, "", *(f"* {remark}" for remark in table.notes)]) + "\n"


def _fields(column: str, value: Value) -> dict[str, Any]:
    if not isinstance(value, Cell):
        return {column: value}
    ends = {f"{column} low": value.low, f"{column} high": value.high} if value.low is not None else {}
    return {column: value.value, **ends, **({f"{column} n": value.n} if value.n is not None else {})}


def csv_text(table: PaperTable) -> str:
    """Every figure unrounded, with the ends of its interval and its number of samples in columns of their own."""
    lines = [
        {k: v for c in table.columns for k, v in _fields(c, row.get(c)).items()} | {"table": table.number}
        for row in table.rows
    ]
    names = ["table"]
    for column in table.columns:
        names += [n for n in (column, *(f"{column} {e}" for e in ("low", "high", "n"))) if any(n in x for x in lines)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def write_table(table: PaperTable, folder: Path) -> list[Path]:
    """Write `table-<number>.csv` and `.md`; the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"table-{table.number}.{ending}" for ending in ("csv", "md")]
    for path, text in zip(paths, (csv_text(table), markdown_text(table)), strict=True):
        write_atomically(path, text)
    return paths
