"""Which tasks an average is over, and with which weights."""

from collections.abc import Sequence
from typing import NamedTuple

from momentkv.evals.tasks.longbench_table import CATEGORIES

RULER_TASKS = 13
AVERAGED = ("longbench", "ruler", "niah", "fidelity")


class Average(NamedTuple):
    """name: as a task of the summary. weights: of full task names, they sum to 1. planned: tasks that will be in it
    when the run is complete. lacks: what of the standard is not in it, for readers, or ""."""

    name: str
    weights: dict[str, float]
    planned: list[str]
    lacks: str


def _mean(name: str, tasks: Sequence[str], planned: Sequence[str], lacks: str = "") -> Average:
    return Average(name, {task: 1 / len(tasks) for task in tasks}, [*planned], lacks)


def _longbench(tasks: Sequence[str], planned: Sequence[str]) -> list[Average]:
    """The paper's average: the mean of six category means, over the English tasks."""
    wanted = {name: [f"longbench/{task}" for task in inside] for name, inside in CATEGORIES.items()}
    here = {name: [task for task in inside if task in tasks] for name, inside in wanted.items()}
    averages = []
    for name, inside in here.items():
        missing = ", ".join(task.partition("/")[2] for task in wanted[name] if task not in inside)
        if inside:
            soon = [task for task in wanted[name] if task in planned]
            averages.append(_mean(f"longbench/{name}", inside, soon, f"without {missing}" if missing else ""))
    if not averages:
        return []
    weights = {task: w / len(averages) for average in averages for task, w in average.weights.items()}
    count, all_of_them = len(weights), sum(map(len, wanted.values()))
    lacks = f"{count} of {all_of_them} English tasks, {len(averages)} of {len(wanted)} categories"
    soon = [task for inside in wanted.values() for task in inside if task in planned]
    return [*averages, Average("longbench/avg", weights, soon, lacks if count < all_of_them else "")]


def averages_of(family: str, tasks: Sequence[str], planned: Sequence[str]) -> list[Average]:
    """The averages of a family over the tasks that a run has.

    Args:
        tasks: full names, all of this family. planned: the same, with those that have not begun.
    """
    if family == "longbench":
        return _longbench(tasks, planned)
    if family not in AVERAGED or not tasks:
        return []
    few = family == "ruler" and len(tasks) < RULER_TASKS
    return [_mean(f"{family}/avg", tasks, planned, f"{len(tasks)} of RULER's {RULER_TASKS} tasks" if few else "")]
