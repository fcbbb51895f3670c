"""What readers of a run's figures must know: missing samples, errors, few samples, partial averages."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from momentkv.evals.averages import Average
from momentkv.evals.results import Results

FEW = 30  # samples below which a percentile interval is not to be taken at its word
_NAMED = 4  # tasks or variants that a note names before it counts


def some(names: Sequence[str]) -> str:
    """The first few of `names`, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def open_errors(results: Results) -> list[dict[str, Any]]:
    """Errors of samples that some variant still lacks: a later run may have mended the others."""
    entries = {(row["task"].partition("/")[0], row["protocol"], row["entry"]) for row in results.rows}
    wanted = Counter(family for family, _, _ in entries)
    here = Counter((row["task"], row["sample"]) for row in results.rows)
    return [
        error
        for error in results.errors
        if here[str(error.get("task")), str(error.get("sample"))]
        < max(1, wanted[str(error.get("task")).partition("/")[0]])
    ]


def totals_of(rows: list[dict[str, Any]], spec: dict[str, Any], errors: list[dict[str, Any]]) -> dict[str, int]:
    """Samples of each task: as the specification says (`samples: {task: n}`), or else as many as were met."""
    samples: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        samples[row["task"]].add(row["sample"])
    for error in errors:
        if error.get("task") in samples and error.get("sample") is not None:
            samples[error["task"]].add(str(error["sample"]))
    said = spec.get("samples")
    planned = {t: n for t, n in said.items() if isinstance(n, int) and n > 0} if isinstance(said, dict) else {}
    return {task: max(len(samples[task]), planned.get(task, 0)) for task in dict.fromkeys([*samples, *planned])}


def missing_rows(rows: list[dict[str, Any]], totals: dict[str, int]) -> list[str]:
    """A note for each task that some variant of its family lacks samples of, and one for all that have no rows."""
    counts = Counter((row["task"], row["entry"]) for row in rows)
    notes, begun = [], {row["task"] for row in rows}
    for task, total in totals.items():
        family = task.partition("/")[0]
        entries = list(dict.fromkeys(row["entry"] for row in rows if row["task"].partition("/")[0] == family))
        short = {entry: counts[task, entry] for entry in entries if counts[task, entry] < total}
        if task not in begun or not short:
            continue
        least = min(short, key=lambda entry: short[entry])
        if len(short) == len(entries) and len(set(short.values())) == 1:
            notes.append(f"{task}: incomplete, {short[least]} of {total} samples")
        else:
            lacking = f"{len(short)} of {len(entries)} variants lack samples"
            notes.append(f"{task}: incomplete, {lacking}: {least.label} has {short[least]} of {total} samples")
    absent = [task for task in totals if task not in begun]
    if absent:
        samples = sum(totals[task] for task in absent)
        notes.append(f"incomplete, no rows yet of {some(absent)}: 0 of {samples} samples")
    return notes


def not_finite(rows: list[dict[str, Any]]) -> list[str]:
    """A note for each task with figures that no mean can be taken of."""
    bad = Counter(
        row["task"] for row in rows for x in row["values"].values() if isinstance(x, float) and not math.isfinite(x)
    )
    return [f"{task}: {count} figures are not finite and left out" for task, count in bad.items()]


def left_out(average: Average, objects: list[dict[str, Any]]) -> list[str]:
    """Notes on what an average is not over."""
    notes = [f"{average.name}: {average.lacks}"] if average.lacks else []
    short = {(o["n"], o["total"]) for o in objects if o["n"] < o["total"]}
    if not objects:
        notes.append(f"{average.name}: there is no sample that all variants have")
    notes += [
        f"{average.name}: over {n} of {total} samples, those that all variants have" for n, total in sorted(short)
    ]
    return notes


def few_samples(objects: list[dict[str, Any]]) -> list[str]:
    """One note for all tasks with fewer than 30 samples, one for those without intervals."""
    few = list(dict.fromkeys(o["task"] for o in objects if o["n"] < FEW))
    none = list(dict.fromkeys(o["task"] for o in objects if o["ci_low"] is None))
    notes = [f"no intervals of {some(none)}: a task with a single sample says nothing about the spread"] if none else []
    if few:
        notes.append(
            f"fewer than {FEW} samples in {some(few)}: such intervals are wide, and still too narrow "
            "(bootstrap percentiles); one of no width only says that all samples scored alike"
        )
    return notes
