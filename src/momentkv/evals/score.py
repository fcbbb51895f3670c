"""The job of `momentkv score`: scores for predictions that are already there."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from momentkv.evals.json_lines import objects, text, texts
from momentkv.evals.metrics import row_score
from momentkv.evals.string_match import string_match_all, string_match_part
from momentkv.evals.task import TaskError
from momentkv.evals.tasks.longbench_table import EXTENDED, TASKS

RULER = (
    *(f"niah_single_{i}" for i in (1, 2, 3)),
    *(f"niah_multikey_{i}" for i in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)
_VALID = {"longbench": tuple(TASKS), "longbench-e": EXTENDED, "ruler": RULER}


class Prediction(NamedTuple):
    """A line of the file: `pred`, `answers`, and `all_classes` for classification."""

    text: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...]

    @classmethod
    def of(cls, row: dict[str, Any], where: str, task: str) -> "Prediction":
        """Checked. RULER's own files say `outputs` for `answers`."""
        family, _, name = task.partition("/")
        answers = "outputs" if family == "ruler" and "answers" not in row and "outputs" in row else "answers"
        classes = family != "ruler" and TASKS[name][0] == "classification"
        named = texts(row, "all_classes", where) if classes else ()
        return cls(text(row, "pred", where), texts(row, answers, where), named)


def full_name(task: str) -> str:
    """ "trec" is "longbench/trec".

    Raises:
        ValueError: there is no such task; the message names the valid ones.
    """
    family, _, name = (task if "/" in task else f"longbench/{task}").partition("/")
    if name in _VALID.get(family, ()):
        return f"{family}/{name}"
    known = _VALID.get(family)
    families = ", ".join(f"{f}/NAME" for f in _VALID if f != family)
    valid = f"valid in {family}: {', '.join(known)}; besides, {families}" if known else f"valid: {families}"
    raise ValueError(f"task {task!r} is not known; {valid}")


def scorer(task: str) -> Callable[[Prediction], float]:
    """How predictions of a task are scored, from 0 to 1."""
    family, _, name = task.partition("/")
    if family == "ruler":
        match = string_match_part if name.startswith("qa") else string_match_all
        return lambda row: match(row.text, row.answers)
    return lambda row: row_score(name, *row)


def run(args: Namespace) -> int:
    """Print a JSON line per row, and one for the task. Nothing is printed where any row is bad. Returns 0."""
    task = full_name(args.task)
    raw = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
    shown = "standard input" if args.file == "-" else args.file
    rows = [(where, Prediction.of(row, where, task)) for where, row in objects(raw, shown)]
    score_of, scores = scorer(task), []
    for where, row in rows:
        try:
            scores.append(score_of(row))
        except TaskError:
            raise
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    for index, score in enumerate(scores):
        print(json.dumps({"index": index, "score": score}))
    print(json.dumps({"task": task, "n": len(scores), "score": round(100 * sum(scores) / len(scores), 2)}))
    return 0
