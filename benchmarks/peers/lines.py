"""JSON lines shared by the scripts of this folder. Needs neither torch nor momentkv: both environments import it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FULL: dict[str, Any] = {"method": "full", "budget": 0, "setting": "full"}
METHODS = ("snapkv", "adakv")
Key = tuple[str, str, int, str]


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, one at a time: a line with the kept positions of all layers is some 100 KB."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def key_of(row: dict[str, Any]) -> Key:
    """What a row measures: sample, method, budget, setting."""
    return row["sample"], row["method"], row["budget"], row["setting"]


class Results:
    """Rows of a run, appended as they come. done: what an earlier, interrupted run has left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done = {key_of(row) for row in read(path)} if path.exists() else set()

    def has(self, sample: str, method: str, budget: int, setting: str) -> bool:
        """Whether a row is there already."""
        return (sample, method, budget, setting) in self.done

    def write(self, row: dict[str, Any]) -> None:
        """Append one row. Its `kept` are positions per layer and head, ascending; None for the full cache."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self.done.add(key_of(row))


def mean_overlap(ours: list[list[list[int]]], theirs: list[list[list[int]]]) -> tuple[float, float, int]:
    """Two sets of kept positions `[layers][heads][tokens]` against each other.

    Returns:
        Share of a layer's kept (head, position) pairs that the other keeps too (of the larger set), mean over the
        layers; the least over the layers; pairs that only one of the two keeps, over all layers.
    """
    shares, differing = [], 0
    for mine, other in zip(ours, theirs, strict=True):
        a = {(head, position) for head, kept in enumerate(mine) for position in kept}
        b = {(head, position) for head, kept in enumerate(other) for position in kept}
        shares.append(len(a & b) / max(len(a), len(b)))
        differing += len(a ^ b)
    return sum(shares) / len(shares), min(shares), differing
