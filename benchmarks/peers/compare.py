"""Two files of answers and kept positions side by side, as a table and a CSV.

    python benchmarks/peers/compare.py --samples samples.jsonl --theirs kvpress.jsonl --ours momentkv.jsonl \
        --out comparison.csv

Prints no table, and exits with 1, where the full caches of the two do not give the same answers: then something other
than the methods differs.
"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from lines import mean_overlap, read
from rich.console import Console
from rich.table import Table

from momentkv.evals.task import Sample
from momentkv.evals.tasks import tasks_of

COLUMNS = ("method", "L", "setting", "n", "kept in common", "least layer", "same answer", "score", "kvpress score")


def scorer(samples: Path) -> Any:
    """A function of a sample's name and a text, to the score of the sample's own task, 0 to 1."""
    known: dict[str, Any] = {}
    for row in read(samples):
        task = tasks_of([row["task"]])[0]
        made = Sample(row["sample"], "", "", tuple(row["answers"]), 1, all_classes=tuple(row["all_classes"]))
        known[row["sample"]] = (task, made)
    return lambda name, text: known[name][0].score(text, known[name][1])


def by_sample(path: Path) -> dict[tuple[str, int, str], dict[str, dict[str, Any]]]:
    """Rows by (method, budget, setting) and sample."""
    found: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in read(path):
        found[row["method"], row["budget"], row["setting"]][row["sample"]] = row
    return found


def gate(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> list[str]:
    """Samples whose answers from the full cache differ."""
    return [name for name in ours if name in theirs and ours[name]["tokens"] != theirs[name]["tokens"]]


def line(key: tuple[str, int, str], ours: dict[str, Any], theirs: dict[str, Any], score: Any) -> dict[str, Any]:
    """One line of the table: a setting of ours against kvpress with the same method and budget."""
    names = [name for name in ours if name in theirs]
    overlaps = [mean_overlap(ours[n]["kept"], theirs[n]["kept"]) for n in names]
    values = (
        *key,
        len(names),
        round(mean(share for share, _, _ in overlaps), 4),
        round(min(least for _, least, _ in overlaps), 4),
        round(mean(ours[n]["tokens"] == theirs[n]["tokens"] for n in names), 3),
        round(mean(score(n, ours[n]["text"]) for n in names), 3),
        round(mean(score(n, theirs[n]["text"]) for n in names), 3),
    )
    return dict(zip(COLUMNS, values, strict=True))


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=160).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--samples", "--theirs", "--ours", "--out"):
        parser.add_argument(name, type=Path, required=True)
    args = parser.parse_args()
    ours, theirs, score = by_sample(args.ours), by_sample(args.theirs), scorer(args.samples)
    full = ("full", 0, "full")
    if differing := gate(ours[full], theirs[full]):
        print(f"the full caches answer differently, so nothing else is comparable: {', '.join(differing)}")
        return 1
    rows = [
        line(key, own, theirs[key[0], key[1], "kvpress"], score)
        for key, own in sorted(ours.items(), key=lambda item: item[0][:2])
        if key != full and theirs.get((key[0], key[1], "kvpress"))
    ]
    show(rows)
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
