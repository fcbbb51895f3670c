"""Figure 4: scores against the budget and against the bytes held, from a run of the evaluation harness."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from momentkv.analysis import draw
from momentkv.analysis.draw import Line, Panel
from momentkv.analysis.figures import model_name, write_csv
from momentkv.evals import run
from momentkv.evals.figures import family_of
from momentkv.evals.results import SPEC
from momentkv.evals.summary import SUMMARY

METHODS = ("h2o", "snapkv", "pyramidkv", "adakv", "momentkv:paper", "momentkv")
BUDGETS = ("128", "256", "512", "1024")  # the paper's
MIB = 2**20
COLUMNS = ("task", "metric", "method", "budget", "tokens_per_head", "bytes", "value", "ci_low", "ci_high", "n", "total")

SIDES = (
    ("at equal tokens", "tokens_per_head", "L, tokens per head"),
    ("at equal bytes", "bytes", "cache after the prompt, MiB"),
)

Objects = list[dict[str, Any]]  # of a summary.json


def name_of(o: dict[str, Any]) -> str:
    """Method and preset in one word."""
    return o["method"] + (f":{o['preset']}" if o["preset"] else "")


def chief(objects: Objects) -> Objects:
    """Of each family its average, or its only task, in its first metric: the methods shown, and the full cache."""
    shown: Objects = []
    for family in dict.fromkeys(family_of(o["task"]) for o in objects):
        tasks = [*dict.fromkeys(o["task"] for o in objects if family_of(o["task"]) == family)]
        task = f"{family}/avg" if f"{family}/avg" in tasks else tasks[0]
        own = [o for o in objects if o["task"] == task]
        metric = own[0]["metric"]
        shown += [
            o for o in own
            if o["metric"] == metric and o["match"] == "tokens" and name_of(o) in ("full", *METHODS)
        ]  # fmt: skip
    return shown


def _line(own: Objects, x: str, style: int) -> Line:
    own = sorted(own, key=lambda o: o["bytes"])
    middle = [o["value"] for o in own]
    low, high = ([o["value"] if o[end] is None else o[end] for o in own] for end in ("ci_low", "ci_high"))
    scale = MIB if x == "bytes" else 1
    return Line(name_of(own[0]), [o[x] / scale for o in own], middle, low, high, bars=True, style=style)


def rows_of_panels(objects: Objects) -> list[list[Panel]]:
    """For each task one panel against tokens per head, and one against bytes."""
    grid = []
    for task in dict.fromkeys(o["task"] for o in objects):
        own = [o for o in objects if o["task"] == task]
        by_method = {m: [o for o in own if name_of(o) == m] for m in METHODS}
        full = [(o["value"], f"full cache, {o['bytes'] / MIB:,.0f} MiB") for o in own if name_of(o) == "full"]
        label = f"{task}, {own[0]['metric']}" + (" (0 to 100)" if own[0]["metric"] == "score" else "")
        row = []
        for title, x, x_label in SIDES:
            lines = [_line(mine, x, i) for i, mine in enumerate(by_method.values()) if mine]
            ticks = sorted({round(v): f"{v:.0f}" for each in lines for v in each.x}.items()) if x != "bytes" else []
            row.append(Panel(title, x_label, label, lines, log=True, ticks=ticks, flat=full))
        grid.append(row)
    return grid


def evaluate(args: Namespace, methods: Sequence[str], folder: Path) -> int:
    """Run the harness into `folder`, or go on with the run there; its exit status."""
    own = {
        "methods": list(methods),
        "budgets": list(args.budgets or BUDGETS),
        "tasks": args.tasks or ["longbench"],
        "out": str(folder),
    }
    return run.run(Namespace(**{**vars(args), **own}))


def plot(folder: Path, stem: Path, model: str) -> str:
    """Draw what the run in `folder` has so far; returns the caption."""
    objects = chief(json.loads((folder / SUMMARY).read_text(encoding="utf-8")))
    said = json.loads((folder / SPEC).read_text(encoding="utf-8"))
    write_csv(
        stem.with_name(f"{stem.name}.csv"),
        COLUMNS,
        [[name_of(o) if c == "method" else o["level"] if c == "budget" else o[c] for c in COLUMNS] for o in objects],
    )
    counts = ", ".join(f"{o['task']} {o['n']} of {o['total']}" for o in objects if name_of(o) == "full")
    caption = (
        f"{model}, protocol {said['protocol']}, samples: {counts}. Left: at equal tokens; right: against the bytes "
        "that each cache holds, its summary included. Bars are 95 % bootstrap intervals."
    )
    draw.panels(stem, rows_of_panels(objects), caption, shared=True)
    return caption


def figure(args: Namespace) -> tuple[str, int]:
    """Write figure-4 into `--out` from a run in `--out`/run; returns its caption and the run's exit status."""
    folder = Path(args.out) / "run"
    status = evaluate(args, METHODS, folder)
    return plot(folder, Path(args.out) / "figure-4", model_name(args)), status
