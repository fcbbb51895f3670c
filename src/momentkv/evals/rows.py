"""Rows of a run, written as they come: nothing is lost when a run is killed, nothing is written twice."""

import json
import os
from pathlib import Path
from typing import Any

from momentkv.evals.results import ERRORS, ROWS

Key = tuple[str, str, str]  # task, sample, variant


class RowFile:
    """The rows of one process. Opening it drops a torn last line.

    Args:
        folder: of the run. part: "" for the one and only process, else a name of this process's own file.
    """

    def __init__(self, folder: Path, part: str = "") -> None:
        self.path = folder / (f"rows.{part}.jsonl" if part else ROWS)
        self.errors = folder / (f"errors.{part}.jsonl" if part else ERRORS)
        for path in (self.path, self.errors):
            _mend(path)
        self.done: set[Key] = set()
        for path in sorted(folder.glob("rows*.jsonl")):
            self.done |= {_key(row) for row in read_lines(path)}

    def write(self, row: dict[str, Any]) -> None:
        """Append a row that is not there yet."""
        if _key(row) not in self.done:
            _append(self.path, row)
            self.done.add(_key(row))

    def fail(self, task: str, sample: str, kind: str, message: str) -> None:
        """Record a sample that could not be measured."""
        _append(self.errors, {"task": task, "sample": sample, "kind": kind, "error": message})


def _key(row: dict[str, Any]) -> Key:
    return row["task"], row["sample"], row["variant"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file.

    Raises:
        ValueError: a line that is not JSON, naming it.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break  # still being written
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
    return rows


def _mend(path: Path) -> None:
    """Cut what follows the last newline: a line that was being written when the process died."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(whole)


def _append(path: Path, row: dict[str, Any]) -> None:
    """Append a line and see it onto the disk; when that fails, what was there before stays readable.

    Raises:
        OSError: the disk is full or the file cannot be written; the message says that the rows so far are safe.
    """
    line = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "surrogatepass")
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab", buffering=0) as file:
            if file.write(line) != len(line):
                raise OSError(f"no space left for {path}")
            os.fsync(file.fileno())
    except OSError as error:
        if path.exists():
            os.truncate(path, before)
        raise OSError(
            f"can not write to {path}: {error.strerror or error}. The rows so far are safe: "
            "make room and start the same command again"
        ) from error


def merge_parts(folder: Path) -> None:
    """Put the rows and errors of several processes into one file each, in a fixed order, and remove the parts."""
    for name in (ROWS, ERRORS):
        stem = name.removesuffix(".jsonl")
        parts = [path for path in sorted(folder.glob(f"{stem}.*.jsonl")) if path.name != name]
        if not parts:
            continue
        known = (
            {json.dumps(row, sort_keys=True) for row in read_lines(folder / name)}
            if (folder / name).exists()
            else set()
        )
        for path in parts:
            for row in read_lines(path):
                if json.dumps(row, sort_keys=True) not in known:
                    _append(folder / name, row)
            path.unlink()
