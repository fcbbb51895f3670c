"""Files of JSON objects, one a line."""

import json
from collections.abc import Iterator
from typing import Any

from momentkv.evals.task import TaskError


def objects(raw: bytes, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object, with "name:line" for messages. Blank lines are skipped.

    Raises:
        TaskError: a line is not UTF-8 or not a JSON object, or there is no line at all.
    """
    some = False
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        where, some = f"{name}:{number}", True
        try:
            found = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise TaskError(f"{where} is not UTF-8: {error.reason} at byte {error.start} of the line") from error
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{where} is not JSON, one object per line is expected: {error}") from error
        if not isinstance(found, dict):
            raise TaskError(f"{where} is {type(found).__name__}, not a JSON object")
        yield where, found
    if not some:
        raise TaskError(f"{name} is empty")


def texts(row: dict[str, Any], field: str, where: str) -> tuple[str, ...]:
    """A field that must be a list of at least one string."""
    value = row.get(field)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise TaskError(f"{where}: {field!r} must be a list of strings, at least one; got {_shown(row, field)}")
    return tuple(value)


def text(row: dict[str, Any], field: str, where: str) -> str:
    """A field that must be a string."""
    value = row.get(field)
    if not isinstance(value, str):
        raise TaskError(f"{where}: {field!r} must be a string; got {_shown(row, field)}")
    return value


def _shown(row: dict[str, Any], field: str) -> str:
    return repr(row[field])[:60] if field in row else "none"
