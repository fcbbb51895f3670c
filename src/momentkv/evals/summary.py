"""From the rows of a run to its summary: one object per task or average, variant and metric."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from momentkv.evals.averages import Average, averages_of
from momentkv.evals.comparison import Compared, compare
from momentkv.evals.figures import Figures, Rows, by_task, family_of, figures_of, higher_is_better, is_score, matrix
from momentkv.evals.results import SIZES, Entry, Results, read_results
from momentkv.evals.shortfalls import few_samples, left_out, missing_rows, not_finite, open_errors, totals_of
from momentkv.evals.spec import write_atomically

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Summary:
    """objects: as in summary.json. notes: what is missing or doubtful, one line each. errors: not mended since."""

    objects: list[dict[str, Any]]
    notes: tuple[str, ...]
    errors: list[dict[str, Any]]


def _round(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.7g}")


def _object(task: str, metric: str, entry: Entry, rows: list[dict[str, Any]], found: Compared, total: int) -> dict:
    scale = 100 if is_score(task) else 1

    def scaled(*values: float | None) -> list[float | None]:
        return [_round(None if v is None else v * scale) for v in values]

    budgets = {row["budget"] for row in rows}
    value, low, high = scaled(found.value, *(found.interval or (None, None)))
    difference, d_low, d_high = scaled(found.difference, *(found.difference_interval or (None, None)))
    return {
        "task": task,
        "protocol": rows[0]["protocol"],
        "method": entry.method,
        "preset": entry.preset,
        "budget": budgets.pop() if len(budgets) == 1 else "varies",
        "level": entry.level,
        "match": entry.match,
        "matched": entry.matched,
        "corrected": entry.corrected,
        **{name: _round(fmean(row[name] for row in rows)) for name in SIZES[:-1]},
        "peak_bytes": max(row["peak_bytes"] for row in rows),
        "metric": metric,
        "value": value,
        "n": len(rows),
        "total": total,
        "ci_low": low,
        "ci_high": high,
        "baseline": found.baseline.label if found.baseline else None,
        "difference": difference,
        "difference_low": d_low,
        "difference_high": d_high,
    }


def _of_task(task: str, metric: str, rows: Rows, figures: Figures, total: int) -> list[dict]:
    """One object per variant, over the samples it has. Its baseline must have all of these."""
    objects: dict[Entry, dict] = {}
    for samples in {frozenset(own) for own in figures.values()}:
        order = sorted(samples)
        entries = [entry for entry, own in figures.items() if samples <= own.keys()]
        nbytes = [fmean(rows[entry, s]["bytes"] for s in order) for entry in entries]
        compared = compare(entries, [(1.0, matrix(figures, entries, order))], nbytes, higher_is_better(task, metric))
        for entry, found in zip(entries, compared, strict=True):
            if figures[entry].keys() == samples:
                mine = [rows[entry, s] for s in order]
                objects[entry] = _object(task, metric, entry, mine, found, total)
    return [objects[entry] for entry in figures]


def _of_average(
    average: Average, metric: str, tasks: dict[str, Rows], figures: dict[str, Figures], totals: dict[str, int]
) -> list[dict]:
    """One object per variant, over the samples that all variants have.

    Args:
        figures: by task, of this metric. A variant that has the metric nowhere (the full cache has no error) is no
            part of it. totals: samples by task.
    """
    weights = {task: w for task, w in average.weights.items() if task in figures}
    entries = list(dict.fromkeys(entry for task in weights for entry in figures[task]))
    common = {t: sorted(set.intersection(*(set(figures[t].get(e, {})) for e in entries))) for t in weights}
    weights = {task: w for task, w in weights.items() if common[task]}
    if not weights:
        return []
    whole = sum(weights.values())
    strata = [(w / whole, matrix(figures[task], entries, common[task])) for task, w in weights.items()]
    pairs = [(task, sample) for task in weights for sample in common[task]]
    mine = [[tasks[task][entry, sample] for task, sample in pairs] for entry in entries]
    nbytes = [fmean(row["bytes"] for row in rows) for rows in mine]
    compared = compare(entries, strata, nbytes, higher_is_better(average.name, metric))
    total = sum(totals[task] for task in average.planned)
    shown = "score" if is_score(average.name) else metric
    return [
        _object(average.name, shown, entry, rows, found, total)
        for entry, rows, found in zip(entries, mine, compared, strict=True)
    ]


def _of_family(family: str, tasks: dict[str, Rows], totals: dict[str, int]) -> tuple[list[dict], list[str]]:
    figures = {task: figures_of(rows) for task, rows in tasks.items()}
    objects, notes = [], []
    for task, by_metric in figures.items():
        for metric, own in by_metric.items():
            objects += _of_task(task, metric, tasks[task], own, totals[task])
    metrics = dict.fromkeys(metric for by_metric in figures.values() for metric in by_metric)
    planned = [task for task in totals if family_of(task) == family]
    for average in averages_of(family, list(tasks), planned):
        if is_score(average.name):  # each task has one metric, of another name
            one = {task: next(iter(figures[task].values())) for task in average.weights if figures[task]}
            found = _of_average(average, "score", tasks, one, totals)
        else:
            found = []
            for metric in metrics:
                having = {task: by_metric[metric] for task, by_metric in figures.items() if metric in by_metric}
                found += _of_average(average, metric, tasks, having, totals)
        objects += found
        notes += left_out(average, found)
    return objects, notes


def summarise(results: Results) -> Summary:
    """All objects of a run, in the order of its tasks, averages after the tasks of their family."""
    objects: list[dict[str, Any]] = []
    notes = [*results.notes]
    errors = open_errors(results)
    for protocol in dict.fromkeys(row["protocol"] for row in results.rows):
        rows = [row for row in results.rows if row["protocol"] == protocol]
        tasks, totals = by_task(rows), totals_of(rows, results.spec, errors)
        for family in dict.fromkeys(map(family_of, tasks)):
            inside = {task: own for task, own in tasks.items() if family_of(task) == family}
            buckets = {task: len({sample for _, sample in own}) for task, own in inside.items()}
            found, said = _of_family(family, inside, buckets | totals)
            objects += found
            notes += said
        notes += missing_rows(rows, totals) + not_finite(rows)
    return Summary(objects, (*notes, *few_samples(objects)), errors)


def write_summary(folder: str | Path) -> Path:
    """Summarise the run in `folder` into its summary.json, at once or not at all.

    Raises:
        ResultsError: as `read_results`.
    """
    path = Path(folder) / SUMMARY
    text = json.dumps(summarise(read_results(folder)).objects, indent=1, allow_nan=False) + "\n"
    write_atomically(path, text)
    return path
