"""Reading the folder of a run: its rows, its errors and what defines it."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from momentkv.evals.variants import ANCHORS, FULL, Variant

ROWS, ERRORS, SPEC = "rows.jsonl", "errors.jsonl", "spec.json"
_TEXTS = ("task", "sample", "protocol", "method", "budget", "level", "match")
SIZES = ("tokens_per_head", "bytes", "summary_bytes", "token_equivalents", "peak_bytes")


class ResultsError(ValueError):
    """The folder of a run cannot be read. One line that names the file, and the line in it."""


class Entry(NamedTuple):
    """A variant as rows name it. matched: the corrected method whose bytes it has, or "" where that is plain."""

    method: str
    preset: str | None
    level: str
    match: str
    corrected: bool
    matched: str

    @property
    def name(self) -> str:
        """Method and preset in one word."""
        return Variant(self.method, self.preset, None, self.level).name

    @property
    def label(self) -> str:
        """`adakv@128`, or `adakv@128 (bytes)`."""
        what = f"bytes of {self.matched}" if self.matched else "bytes"
        return f"{self.name}@{self.level}" + (f" ({what})" if self.match == "bytes" else "")

    @property
    def plain(self) -> bool:
        """Whether it can be a baseline: it evicts and corrects nothing."""
        return not self.corrected and self.method != FULL

    @property
    def group(self) -> int:
        """Order in tables: the full cache, anchors, plain methods, plain ones at equal bytes, corrected ones."""
        if self.method == FULL:
            return 0
        if self.corrected:
            return 4
        return 3 if self.match == "bytes" else 1 if self.method in ANCHORS and not self.preset else 2


@dataclass(frozen=True)
class Results:
    """One run. rows: checked, each with its `entry`, one per sample and variant, in the order of the specification.
    notes: what readers must know."""

    folder: Path
    spec: dict[str, Any]
    rows: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    notes: tuple[str, ...]


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Line numbers and objects; None for a torn last line, which a run that was killed leaves behind."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
                if not isinstance(found, dict):
                    raise ValueError
                yield number, found
            except ValueError:
                if line.endswith(b"\n"):
                    raise ResultsError(f"{path}:{number}: not a JSON object") from None
                yield number, None


def _check(row: dict[str, Any], where: str) -> None:
    for field in _TEXTS:
        if not isinstance(row.get(field), str):
            raise ResultsError(f"{where}: {field!r} must be a text, not {row.get(field)!r}")
    for field in SIZES:
        value = row.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ResultsError(f"{where}: {field!r} must be a number, not {value!r}")
    if not isinstance(row.get("corrected"), bool) or not isinstance(row.get("values"), dict):
        raise ResultsError(f"{where}: 'corrected' must be true or false, and 'values' an object")
    if row.get("preset") is not None and not isinstance(row["preset"], str):
        raise ResultsError(f"{where}: 'preset' must be a text or null, not {row['preset']!r}")
    if "/" not in row["task"]:
        raise ResultsError(f"{where}: task {row['task']!r} is not FAMILY/NAME")


def _ambiguous(rows: list[dict[str, Any]]) -> set[tuple[str, str | None, str]]:
    """Plain methods that got the bytes of several corrected ones at a level."""
    seen = defaultdict(set)
    for row in rows:
        if row["match"] == "bytes":
            key = (row["method"], row.get("preset"), row["level"])
            seen[key, row["task"], row["sample"], row["protocol"]].add(row.get("matched") or row["budget"])
    return {key for (key, *_), found in seen.items() if len(found) > 1}


def _deduplicated(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with its `entry`; of several rows of one sample and variant the last, which a repeated sample wrote."""
    several = _ambiguous(rows)
    kept: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        method, preset, level = key = row["method"], row.get("preset"), row["level"]
        matched = (row.get("matched") or row["budget"]) if row["match"] == "bytes" and key in several else ""
        entry = Entry(method, preset, level, row["match"], row["corrected"], str(matched))
        kept[row["task"], row["sample"], row["protocol"], entry] = row | {"entry": entry}
    return list(kept.values())


def _in_order(rows: list[dict[str, Any]], spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows by task, then variant, as the specification lists them: they were written as each was done."""
    order = {
        name: {key: i for i, key in enumerate(spec[name])} if isinstance(spec.get(name), list) else {}
        for name in ("tasks", "variants")
    }
    last = len(rows)
    return sorted(
        rows, key=lambda row: (order["tasks"].get(row["task"], last), order["variants"].get(row.get("variant"), last))
    )


def _spec(path: Path) -> dict[str, Any]:
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ResultsError(f"{path}: not JSON: {error}") from None
    if not isinstance(spec, dict):
        raise ResultsError(f"{path}: not a JSON object")
    return spec


def read_results(folder: str | Path) -> Results:
    """The run in `folder`. A torn last line is left out and noted; of repeated rows the last counts.

    Raises:
        ResultsError: no such run, no rows, or a damaged line.
    """
    folder = Path(folder)
    if not (folder / ROWS).is_file():
        raise ResultsError(f"no {ROWS} in {str(folder)!r}: not the folder of a run")
    notes, tables = [], {}
    for name in (ROWS, ERRORS):
        found = list(_objects(folder / name)) if (folder / name).is_file() else []
        if any(row is None for _, row in found):
            notes.append(f"the last line of {name} is torn and left out")
        tables[name] = [(number, row) for number, row in found if row is not None]
    for number, row in tables[ROWS]:
        _check(row, f"{folder / ROWS}:{number}")
    if not tables[ROWS]:
        raise ResultsError(f"{folder / ROWS}: no rows")
    if not (folder / SPEC).is_file():
        notes.append(f"no {SPEC}: the model is unknown")
    spec = _spec(folder / SPEC) if (folder / SPEC).is_file() else {}
    rows = _in_order(_deduplicated([row for _, row in tables[ROWS]]), spec)
    errors = list({(e.get("task"), e.get("sample")): e for _, e in tables[ERRORS]}.values())
    return Results(folder, spec, rows, errors, tuple(notes))
