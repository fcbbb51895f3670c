"""The evaluation runs behind the tables of scores: what is run for each, and its figures."""

import contextlib
import io
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from momentkv.analysis import published
from momentkv.analysis.table_layout import Cell
from momentkv.budgets import Budget
from momentkv.evals.averages import averages_of
from momentkv.evals.figures import Figures, by_task, family_of, figures_of, matrix
from momentkv.evals.report.layout import entry_of
from momentkv.evals.results import Entry, Results, read_results
from momentkv.evals.statistics import bootstrap, interval, weighted_means
from momentkv.evals.summary import summarise
from momentkv.evals.task import TaskError
from momentkv.evals.tasks import tasks_of
from momentkv.evals.tasks.longbench_table import ENGLISH

SYSTEM = "momentkv:paper"  # the system of the paper; the first corrected method, so that the equal bytes are its own
COMPARED = ("h2o", "snapkv", "pyramidkv", "adakv", SYSTEM, "momentkv")
MOMENT = "score=moment+rounds=4+block=4"  # the selection of `momentkv:paper`
ABLATED = ("snapkv", f"snapkv+{MOMENT}", "snapkv+correction=first", f"snapkv+{MOMENT}+correction=first")
ORDERED = ("snapkv", "snapkv+correction=zeroth", "snapkv+correction=first", ABLATED[3])
FAMILIES = ("longbench", "ruler", "niah")  # those whose figures are scores and have an average
_LONGBENCH = tuple(f"longbench/{task}" for task in ENGLISH)


@dataclass(frozen=True)
class Plan:
    """What is run for a table unless the command says otherwise. folder: of the run, None for the family's name."""

    folder: str | None
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    budgets: tuple[int, ...]


_MAIN = Plan(None, _LONGBENCH, COMPARED, published.BUDGETS)
PLANS = {
    1: _MAIN,
    2: Plan(None, ("ruler",), COMPARED, (published.RULER_BUDGET,)),
    3: Plan("ablation", _LONGBENCH, ABLATED, tuple(published.ABLATION_BASE)),
    4: Plan("order", _LONGBENCH, ORDERED, (128,)),
    7: _MAIN,
    8: _MAIN,
}


def budgets_of(args: Namespace, default: Sequence[int]) -> list[int]:
    """The budgets asked for, in tokens per head as the paper counts them.

    Raises:
        ValueError: one that is not in tokens.
    """
    given = [Budget.parse(b) for b in (args.budgets or default)]
    for budget in given:
        if budget.kind != "tokens":
            raise ValueError(f"budget {str(budget)!r}: the paper's tables take budgets in tokens per head, such as 128")
    return [int(budget.amount) for budget in given]


class Run:
    """A finished run, as tables read it. family: of its tasks. Only rows of one protocol count."""

    def __init__(self, folder: Path, protocol: str) -> None:
        results = read_results(folder)
        rows = [row for row in results.rows if row["protocol"] == protocol]
        self.results = Results(results.folder, results.spec, rows, results.errors, results.notes)
        self.summary = summarise(self.results)
        self.objects = self.summary.objects
        self.family = family_of(rows[0]["task"]) if rows else ""

    @property
    def score(self) -> str:
        """The task that stands for the whole: the family's average."""
        return f"{self.family}/avg"

    def entries(self, level: int) -> list[Entry]:
        """The variants of a budget, the full cache first, as tables order them."""
        mine = dict.fromkeys(entry_of(o) for o in self.objects if o["level"] in (str(level), "full"))
        return sorted(mine, key=lambda entry: entry.group)

    def entry(self, name: str, level: int, match: str = "tokens") -> Entry | None:
        """The variant of that name as on the command line, or None. match "bytes": the one at the summary's bytes."""
        found = [e for e in self.entries(level) if e.name == name and e.match == match]
        return found[0] if found else None

    def object(self, task: str, entry: Entry | None) -> dict[str, Any] | None:
        """The summary's object of a task or average, or None."""
        found = [o for o in self.objects if o["task"] == task and entry_of(o) == entry]
        return found[0] if found else None

    def cell(self, task: str, entry: Entry | None) -> Cell:
        """A score with its interval."""
        o = self.object(task, entry)
        return Cell(o["value"], o["ci_low"], o["ci_high"], o["n"]) if o else Cell(None)

    @cached_property
    def _figures(self) -> dict[str, Figures]:
        found = {task: figures_of(rows) for task, rows in by_task(self.results.rows).items()}
        return {task: next(iter(own.values())) for task, own in found.items() if own}

    def difference(self, task: str, entry: Entry | None, base: Entry | None) -> Cell:
        """Score of `entry` less that of `base`, paired, over the samples that all variants have."""
        tasks = list(self._figures)
        weights = {a.name: a.weights for a in averages_of(self.family, tasks, tasks)}.get(task, {task: 1.0})
        common = {t: sorted(set.intersection(*(set(x) for x in self._figures[t].values()))) for t in weights}
        weights = {t: w for t, w in weights.items() if common[t]}
        pair = [entry, base]
        if not weights or any(e is None or e not in self._figures[t] for t in weights for e in pair):
            return Cell(None)
        own = [e for e in pair if e is not None]
        strata = [
            (100 * w / sum(weights.values()), matrix(self._figures[t], own, common[t])) for t, w in weights.items()
        ]
        values, draws = weighted_means(strata), bootstrap(strata)
        spread = all(x.shape[1] > 1 for _, x in strata)
        low, high = interval(draws[:, 0] - draws[:, 1]).tolist() if spread else (None, None)
        count = sum(x.shape[1] for _, x in strata)
        return Cell(float(values[0] - values[1]), low, high, count, sign="+")


def check(args: Namespace, number: int) -> tuple[list[str], list[int]]:
    """Tasks and budgets of a table's run.

    Raises:
        TaskError: unknown tasks, tasks without a score, or of several families. ValueError: see `budgets_of`.
    """
    names = list(args.tasks or PLANS[number].tasks)
    families = dict.fromkeys(task.family for task in tasks_of(names, [Path(p) for p in args.texts]))
    if len(families) != 1 or not set(families) <= set(FAMILIES):
        raise TaskError(
            f"table {number} is over tasks of one family, not of {', '.join(families)}; valid: {', '.join(FAMILIES)}"
        )
    budgets = budgets_of(args, PLANS[number].budgets)
    if number == 4 and len(budgets) != 1:
        raise ValueError(f"table 4 is of one budget, not of {', '.join(map(str, budgets))}")
    return names, budgets


def run_for(args: Namespace, number: int) -> tuple[Run, list[int], int]:
    """Run what a table needs, or go on with it, or read it if it is complete.

    Returns:
        The run, its budgets, and the status of the evaluation: 1 when samples failed.
    """
    from momentkv.evals import run as harness

    plan = PLANS[number]
    names, budgets = check(args, number)
    folder = Path(args.out) / (plan.folder or tasks_of(names, [Path(p) for p in args.texts])[0].family)
    own: dict[str, Any] = {
        "tasks": names,
        "methods": list(plan.methods),
        "budgets": [*map(str, budgets)],
        "out": str(folder),
    }
    own |= {"engine": "local", "workers": 1}
    with contextlib.redirect_stdout(io.StringIO()):  # its own tables: the folder holds them
        status = harness.run(Namespace(**(vars(args) | own)))
    return Run(folder, args.protocol), budgets, status
