"""What defines a run. A folder holds one run: another specification is refused with the difference."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import momentkv
from momentkv.evals.task import Sample

SPEC = "spec.json"
DERIVED = ("variants", "samples", "data")  # follow from the options: named only where no option differs


class SpecError(ValueError):
    """The folder holds another run. The message shows what differs."""


def versions() -> dict[str, str]:
    """Of everything that can move a number."""
    return {
        "momentkv": momentkv.__version__,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def fingerprint(samples: Sequence[Sample]) -> str:
    """Of the texts and references of a task's samples: other data make another run."""
    digest = hashlib.sha256()
    for s in samples:
        parts = [s.id, s.context, s.question, s.prefix, list(s.answers), s.max_new_tokens, dict(s.facts)]
        digest.update(json.dumps(parts, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def write_atomically(path: Path, text: str) -> None:
    """The whole text or nothing, also when the process is killed."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{name}.{key}" if name else key).items()}


def check(folder: Path, options: Mapping[str, Any]) -> None:
    """Compare with the specification that is there, before any model is loaded.

    Args:
        options: what is known of the specification so far. What it does not name is not compared.

    Raises:
        SpecError: a run with other options is there; each difference is shown, old and new.
        ValueError: `folder` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {str(folder)!r} is a file, not a folder")
    path = folder / SPEC
    if not path.exists():
        return
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        there = _flat({name: value for name, value in old.items() if name in options})
    except (ValueError, AttributeError) as error:
        raise SpecError(f"{path} is damaged ({error}): move the folder away to start anew") from error
    asked = _flat(json.loads(json.dumps(options)))
    differing = sorted(name for name in there.keys() | asked.keys() if there.get(name) != asked.get(name))
    chosen = [name for name in differing if name.partition(".")[0] not in DERIVED]
    if differing:
        shown = "; ".join(f"{n}: {there.get(n)!r} there, {asked.get(n)!r} asked for" for n in chosen or differing)
        raise SpecError(f"{folder} holds another run, use another --out. {shown}")


def settle(folder: Path, spec: Mapping[str, Any]) -> None:
    """Write the specification, or check that the one already there is the same.

    Raises:
        SpecError: as `check`.
    """
    check(folder, spec)
    if not (folder / SPEC).exists():
        write_atomically(folder / SPEC, json.dumps(spec, indent=1) + "\n")
