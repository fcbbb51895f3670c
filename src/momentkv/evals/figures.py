"""The figures of a run by task, metric, variant and sample, and what kind each is of."""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from momentkv.evals.results import Entry

Rows = dict[tuple[Entry, str], dict[str, Any]]  # by variant and sample
Figures = dict[Entry, dict[str, float]]  # by variant and sample
FIRST = (
    "kl",
    "nll",
    "top1",
    "kl_median",
    "kl_p90",
    "error",
    "error_projected",
    "worse_share",
)  # metrics, in this order


def family_of(task: str) -> str:
    """`ruler` of `ruler/vt`."""
    return task.partition("/")[0]


def is_score(task: str) -> bool:
    """Whether the task's figures are scores from 0 to 1, which are shown times 100."""
    return family_of(task) != "fidelity"


def higher_is_better(task: str, metric: str) -> bool:
    """Of scores and of the agreement with the full cache; every other figure of fidelity is a distance."""
    return is_score(task) or metric.startswith("top1")


def _tasks_of(row: dict[str, Any]) -> Iterator[str]:
    yield row["task"]
    bucket = row.get("facts", {}).get("bucket") if family_of(row["task"]) == "longbench-e" else None
    if bucket is not None:
        yield f"{row['task']}/{bucket}"


def by_task(rows: list[dict[str, Any]]) -> dict[str, Rows]:
    """Rows of each task, and of each length bucket of LongBench-E as a task of its own."""
    tasks: dict[str, Rows] = defaultdict(dict)
    for row in rows:
        for task in _tasks_of(row):
            tasks[task][row["entry"], row["sample"]] = row
    return tasks


def figures_of(rows: Rows) -> dict[str, Figures]:
    """By metric, the chief one first. Tables per head, and figures that are not finite, are left out."""
    found: dict[str, Figures] = defaultdict(lambda: defaultdict(dict))
    for (entry, sample), row in rows.items():
        for metric, value in row["values"].items():
            if isinstance(value, int | float) and math.isfinite(value):
                found[metric][entry][sample] = float(value)
    return {m: found[m] for m in sorted(found, key=lambda m: FIRST.index(m) if m in FIRST else len(FIRST))}


def matrix(figures: Figures, entries: list[Entry], samples: list[str]) -> np.ndarray:
    """`[entries, samples]`. All of them must be there."""
    return np.array([[figures[entry][sample] for sample in samples] for entry in entries])
