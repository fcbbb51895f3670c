"""The tables of a report, and how their figures are written. One table is of one run, protocol, family and level."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from momentkv.evals.figures import family_of, higher_is_better, is_score
from momentkv.evals.report.runs import View
from momentkv.evals.results import Entry
from momentkv.evals.variants import FULL

MIB = 2**20


@dataclass(frozen=True)
class Table:
    """Variants of one level on one task (or average) and metric, in the order of tables, the full cache first."""

    family: str
    level: str
    task: str
    metric: str
    objects: list[dict[str, Any]]

    @property
    def arrow(self) -> str:
        """Which way is better."""
        return "↑" if higher_is_better(self.task, self.metric) else "↓"

    @property
    def best(self) -> float | None:
        """The best value of a compressed cache; of a corrected one where a correction's own harm is measured."""
        values = [o["value"] for o in self.objects if self._competes(o)]
        return (max if self.arrow == "↑" else min)(values, default=None)

    @property
    def digits(self) -> int:
        """Decimals that all figures of the table are shown with."""
        if is_score(self.task):
            return 1
        sizes = sorted(abs(o["value"]) for o in self.objects if o["value"])
        return min(6, max(1, 2 - math.floor(math.log10(sizes[len(sizes) // 2])))) if sizes else 3

    def is_best(self, o: dict[str, Any]) -> bool:
        """Whether `o` shows the best value of the table, ties included, unless all tie."""
        shown = {self.show(x["value"]) for x in self.objects if self._competes(x)}
        return self._competes(o) and len(shown) > 1 and self.show(o["value"]) == self.show(self.best or 0.0)

    def _competes(self, o: dict[str, Any]) -> bool:
        return o["method"] != FULL and (o["corrected"] or not self.metric.startswith("worse"))

    def show(self, x: float, sign: str = "") -> str:
        """A figure of this table; sign "+" for differences."""
        return f"{x:{sign}.{self.digits}f}"

    def value(self, o: dict[str, Any]) -> str:
        """The value and its interval."""
        return self.show(o["value"]) + self._interval(o["ci_low"], o["ci_high"])

    def difference(self, o: dict[str, Any]) -> str:
        """The difference to the baseline and its interval, or "-"."""
        if o["difference"] is None:
            return "-"
        return self.show(o["difference"], "+") + self._interval(o["difference_low"], o["difference_high"], "+")

    def baseline(self, o: dict[str, Any]) -> str:
        """The baseline as the table's other lines call it, or "-"."""
        names = {entry_of(other).label: short_name(other) for other in self.objects}
        return names.get(o["baseline"], o["baseline"] or "-")

    def _interval(self, low: float | None, high: float | None, sign: str = "") -> str:
        return "" if low is None or high is None else f" [{self.show(low, sign)}, {self.show(high, sign)}]"


def entry_of(o: dict[str, Any]) -> Entry:
    """The variant of a summary's object."""
    return Entry(o["method"], o["preset"], o["level"], o["match"], o["corrected"], o["matched"])


def name_of(o: dict[str, Any]) -> str:
    """`adakv`, `momentkv:paper`, `adakv, equal bytes`."""
    entry = entry_of(o)
    return entry.name + (
        ""
        if entry.match != "bytes"
        else f", {entry.matched and 'bytes of ' + entry.matched}"
        if entry.matched
        else ", equal bytes"
    )


def budget_of(o: dict[str, Any]) -> str:
    """As given, but bytes in MiB."""
    budget = str(o["budget"])
    return f"{int(budget[:-1]) / MIB:.2f}MiB" if budget.endswith("B") and budget[:-1].isdigit() else budget


def short_name(o: dict[str, Any]) -> str:
    """As `name_of`, but `adakv 7.08MiB` for one that was given another's bytes."""
    entry = entry_of(o)
    return f"{entry.name} {budget_of(o)}" if entry.match == "bytes" and o["budget"] != "varies" else name_of(o)


def count_of(o: dict[str, Any]) -> str:
    """`10`, or `7/10` where samples are missing."""
    return str(o["n"]) if o["n"] >= o["total"] else f"{o['n']}/{o['total']}"


@dataclass(frozen=True)
class Matrix:
    """Values alone: a line per variant, a column per task or metric. Its tables are of one run, family and level."""

    heading: str
    tables: list[Table]

    @property
    def labels(self) -> list[str]:
        """Of the columns: what tells them apart, with arrows where they differ."""
        tasks, arrows = ({table.task for table in self.tables}, {table.arrow for table in self.tables})
        plain = [t.task.partition("/")[2] if len(tasks) > 1 else t.metric for t in self.tables]
        return plain if len(arrows) == 1 else [f"{p} {t.arrow}" for p, t in zip(plain, self.tables, strict=True)]

    @property
    def title(self) -> str:
        """The heading, with an arrow if it is the same for all columns."""
        arrows = {table.arrow for table in self.tables}
        return f"{self.heading} {arrows.pop()}" if len(arrows) == 1 else self.heading

    @property
    def lines(self) -> list[tuple[dict[str, Any], list[tuple[Table, dict[str, Any] | None]]]]:
        """Each variant, as an object that names it, and its cells."""
        by_entry = [{entry_of(o): o for o in table.objects} for table in self.tables]
        entries = {entry: o for column in by_entry for entry, o in column.items()}
        ordered = sorted(entries.items(), key=lambda item: item[0].group)
        return [
            (o, [(t, column.get(entry)) for t, column in zip(self.tables, by_entry, strict=True)])
            for entry, o in ordered
        ]


def all_tables(view: View) -> list[Table]:
    """Every table: by family, then level, then task and metric."""
    tables = []
    for family in dict.fromkeys(family_of(o["task"]) for o in view.objects):
        mine = [o for o in view.objects if family_of(o["task"]) == family]
        for level in dict.fromkeys(o["level"] for o in mine if o["level"] != FULL) or (FULL,):
            for task, metric in dict.fromkeys((o["task"], o["metric"]) for o in mine if o["level"] == level):
                inside = [o for o in mine if (o["task"], o["metric"]) == (task, metric) and o["level"] in (level, FULL)]
                tables.append(Table(family, level, task, metric, sorted(inside, key=lambda o: entry_of(o).group)))
    return tables


def headlines(tables: Sequence[Table]) -> list[Table]:
    """Those with intervals that are shown first: of the family's average, or of every task where there is none.

    Args:
        tables: of one family and level. The first metric stands for all.
    """
    averages = [table for table in tables if table.task == f"{table.family}/avg"]
    return averages[:1] or list({table.task: table for table in reversed(tables)}.values())[::-1]


def matrices(tables: Sequence[Table]) -> list[Matrix]:
    """All metrics of the average where there are several, and the first metric of every task.

    Args:
        tables: of one family and level.
    """
    averages = [table for table in tables if table.task == f"{table.family}/avg"]
    first = list({table.task: table for table in reversed(tables)}.values())[::-1]
    found = [Matrix("every figure, means over texts", averages)] if len(averages) > 1 else []
    if len(first) > len(averages[:1]) + 1:  # the average of one task is that task
        found.append(Matrix("every task" if is_score(first[0].task) else f"{first[0].metric} of every text", first))
    return found


def grouped(tables: Sequence[Table]) -> dict[tuple[str, str], list[Table]]:
    """By family and level."""
    groups: dict[tuple[str, str], list[Table]] = {}
    for table in tables:
        groups.setdefault((table.family, table.level), []).append(table)
    return groups
